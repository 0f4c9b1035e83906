"""The tables that notebook 07 shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from IPython.display import Markdown


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Markdown:
    """Return a Markdown table.

    Args:
        columns: The head of each column.
        rows: A value for each column. Whole numbers get thousands separators; pass values that only look like numbers, such as
            process ids, as text.

    Ranks: controller.
    """
    lines = [
        columns,
        ["---"] * len(columns),
        *([f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows),
    ]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))

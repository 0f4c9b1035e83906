"""Pictures of the ranks' values and processes: collectives before and after, drawn from real values.

Nothing here imports torch. A value is an object with ``tolist()`` (a tensor, an array), a list, or one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from labkit.notebook.drawing.boxes import ROW_IN, Rows, ValueBox, canvas, draw_panels, head_in, number_text
from labkit.notebook.drawing.style import INK, MUTED, Picture, figure, rank_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce"]

MAX_RANKS = 16
MAX_VALUES = 16

_CAPTIONS: dict[CollectiveName, str] = {
    "all_gather": "All-gather: every rank ends with the pieces of all ranks, in rank order.",
    "reduce_scatter": "Reduce-scatter: the ranks add up column by column, and each rank keeps one piece of the sum.",
    "all_reduce": "All-reduce: the ranks add up column by column, and every rank keeps the whole sum.",
}


def collective_picture(
    collective: CollectiveName, before: Mapping[int, Any], after: Mapping[int, Any], *, caption: str | None = None
) -> Picture:
    """Draw the values of each rank before and after a summing or gathering collective.

    The colours of ``after`` are checked, not assumed: each value is compared with the result that the collective should produce
    from ``before``. A value that differs is drawn as a white box with a dashed edge and a question mark.

    Args:
        collective: ``all_gather``, ``reduce_scatter`` or ``all_reduce``; the reduction is the sum.
        before: Per rank, its input values, for example the result of ``pool.pull``. Up to 16 numbers; tensors and arrays of any
            shape are read row by row.
        after: Per rank, its output values, for the same ranks.
        caption: The line under the picture; by default one sentence that explains the collective.

    Returns:
        The picture, 6 inches wide and about half an inch high per rank.

    Raises:
        ValueError: The ranks or the numbers of values do not match, or there are too many to be readable.

    Ranks: controller or local; it does not communicate with any rank.
    """
    inputs, outputs = _numbers_per_rank(before), _numbers_per_rank(after)
    if inputs.keys() != outputs.keys():
        raise ValueError(f"before has the ranks {list(inputs)}, after has {list(outputs)}: pull both from the same ranks")
    left, right, pieces = _ROWS[collective](inputs, outputs)
    strange = sum(not box.sources for row in right.values() for box in row)
    words = (caption or _CAPTIONS[collective]) + " Under each value: the ranks that it comes from."
    name = collective.replace("_", "-")
    if strange:
        words += f" Dashed: not what the {name} gives."
    with figure(height_in=head_in(pieces) + ROW_IN * len(inputs) + 0.04) as fig:
        draw_panels(canvas(fig), name, left, right, pieces)
        return Picture.from_figure(
            fig,
            alt=_alt_text(name, inputs, outputs, strange),
            caption=words,
            columns=("rank", f"before the {name}", f"after the {name}"),
            rows=[(rank, _join(inputs[rank]), _join(outputs[rank])) for rank in inputs],
        )


def process_picture(controller_pid: int, rank_pids: Mapping[int, int]) -> Picture:
    """Draw the kernel's process and one process per rank, each with its process id.

    Args:
        controller_pid: The kernel's process id.
        rank_pids: The process id of each rank, for example ``pool.run(os.getpid)``.

    Returns:
        The picture, 6 inches wide and about half an inch high per rank.

    Raises:
        ValueError: No rank, or more than 16.

    Ranks: controller.
    """
    _check_ranks(rank_pids)
    ranks = sorted(rank_pids)
    height = max(0.44 * len(ranks), 0.9) + 0.15
    with figure(height_in=height) as fig:
        _draw_processes(canvas(fig), height, controller_pid, {rank: rank_pids[rank] for rank in ranks})
        listing = ", ".join(f"rank {rank} is process {rank_pids[rank]}" for rank in ranks)
        return Picture.from_figure(
            fig,
            alt=f"The kernel, process {controller_pid}, sends cells to {_count(len(ranks))}: {listing}.",
            caption="The kernel runs your notebook and is not a rank. Each rank is a process of its own, with its own memory.",
            columns=("who", "process id"),
            rows=[("kernel", controller_pid), *((f"rank {rank}", rank_pids[rank]) for rank in ranks)],
        )


# From values to boxes ----------------------------------------------------------------------------------------------


def _numbers_per_rank(values: Mapping[int, Any]) -> dict[int, list[float]]:
    _check_ranks(values)
    numbers = {rank: list(_flatten(values[rank])) for rank in sorted(values)}
    longest = max(len(row) for row in numbers.values())
    if longest > MAX_VALUES:
        raise ValueError(f"a rank holds {longest} values; a picture stays readable up to {MAX_VALUES}. Draw a slice of them.")
    return numbers


def _check_ranks(values: Mapping[int, Any]) -> None:
    if not 1 <= len(values) <= MAX_RANKS:
        raise ValueError(f"a picture shows 1 to {MAX_RANKS} ranks, not {len(values)}")


def _flatten(value: Any) -> Iterable[float]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _flatten(item)
    else:
        yield float(value)


def _offsets(pieces: Mapping[int, Sequence[float]]) -> dict[int, int]:
    """Return where each rank's piece starts if the pieces are concatenated in rank order."""
    offsets, start = {}, 0
    for rank, piece in pieces.items():
        offsets[rank] = start
        start += len(piece)
    return offsets


def _all_gather_rows(inputs: dict[int, list[float]], outputs: dict[int, list[float]]) -> tuple[Rows, Rows, dict[int, int]]:
    offsets = _offsets(inputs)
    left = {rank: [ValueBox(offsets[rank] + i, x, (rank,)) for i, x in enumerate(piece)] for rank, piece in inputs.items()}
    whole = [box for row in left.values() for box in row]
    _check_lengths(outputs, len(whole))
    return left, _judged(outputs, [(box.value, box.sources) for box in whole]), offsets


def _reduce_scatter_rows(inputs: dict[int, list[float]], outputs: dict[int, list[float]]) -> tuple[Rows, Rows, dict[int, int]]:
    left, total = _own_rows(inputs), _sums(inputs)
    offsets = _offsets(outputs)
    if sum(map(len, outputs.values())) != len(total):
        raise ValueError(f"the pieces after a reduce-scatter hold {sum(map(len, outputs.values()))} values, before it {len(total)}")
    return left, _judged(outputs, total, offsets), offsets


def _all_reduce_rows(inputs: dict[int, list[float]], outputs: dict[int, list[float]]) -> tuple[Rows, Rows, dict[int, int]]:
    total = _sums(inputs)
    _check_lengths(outputs, len(total))
    return _own_rows(inputs), _judged(outputs, total), {}


_ROWS = {"all_gather": _all_gather_rows, "reduce_scatter": _reduce_scatter_rows, "all_reduce": _all_reduce_rows}


def _own_rows(inputs: dict[int, list[float]]) -> Rows:
    return {rank: [ValueBox(i, x, (rank,)) for i, x in enumerate(row)] for rank, row in inputs.items()}


def _sums(inputs: dict[int, list[float]]) -> list[tuple[float, tuple[int, ...]]]:
    _check_lengths(inputs, len(next(iter(inputs.values()))))
    return [(math.fsum(column), tuple(inputs)) for column in zip(*inputs.values(), strict=True)]


def _check_lengths(values: dict[int, list[float]], length: int) -> None:
    for rank, row in values.items():
        if len(row) != length:
            raise ValueError(f"rank {rank} holds {len(row)} values where {length} are expected")


def _judged(
    outputs: dict[int, list[float]], expected: Sequence[tuple[float, tuple[int, ...]]], offsets: Mapping[int, int] | None = None
) -> Rows:
    rows: Rows = {}
    for rank, row in outputs.items():
        start = offsets[rank] if offsets else 0
        rows[rank] = []
        for column, value in enumerate(row, start):
            right, sources = expected[column]
            # Ranks add in float32 and in their own order, so allow for rounding; a wrong value differs by more.
            same = math.isclose(value, right, rel_tol=1e-5, abs_tol=1e-6)
            rows[rank].append(ValueBox(column, value, sources if same else ()))
    return rows


def _draw_processes(ax: Axes, height: float, controller_pid: int, rank_pids: Mapping[int, int]) -> None:
    from matplotlib.patches import Rectangle

    middle = height / 2
    ax.add_patch(Rectangle((0.1, middle - 0.36), 1.75, 0.72, fc="white", ec=INK, lw=1.2))
    ax.text(
        0.975, middle, f"kernel (your notebook)\nprocess {controller_pid}\nnot a rank", ha="center", va="center", linespacing=1.35
    )
    top = middle - 0.44 * len(rank_pids) / 2
    for line, (rank, pid) in enumerate(rank_pids.items()):
        style, y = rank_style(rank), top + 0.44 * (line + 0.5)
        ax.annotate("", (3.2, y), (1.87, middle), arrowprops={"arrowstyle": "-|>", "color": MUTED, "lw": 1.0})
        ax.add_patch(Rectangle((3.22, y - 0.17), 1.75, 0.34, fc=style.color, ec=INK, lw=0.8))
        ax.text(4.095, y, f"rank {rank}: process {pid}", ha="center", va="center", color=style.text_color)
    ax.text(2.4, middle - 0.18 - 0.11 * len(rank_pids), "cells", ha="center", va="center", color=MUTED)
    if len(rank_pids) > 1:
        ax.plot([5.05, 5.12, 5.12, 5.05], [top + 0.1, top + 0.1, height - top - 0.1, height - top - 0.1], color=INK, lw=1.0)
        ax.text(5.2, middle, "process\ngroup", va="center")


# Words -------------------------------------------------------------------------------------------------------------


def _alt_text(name: str, inputs: dict[int, list[float]], outputs: dict[int, list[float]], strange: int) -> str:
    text = f"Before the {name}, {_holdings(inputs)}. After it, {_holdings(outputs)}."
    if strange:
        text += f" {strange} of these values {'is' if strange == 1 else 'are'} not what the {name} gives."
    return text


def _holdings(values: dict[int, list[float]]) -> str:
    first, *others = values.values()
    if others and all(row == first for row in others):
        return f"every rank holds {_join(first)}"
    return "; ".join(f"rank {rank} holds {_join(row)}" for rank, row in values.items())


def _join(row: Sequence[float]) -> str:
    return ", ".join(map(number_text, row)) or "nothing"


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"

"""Plain text for people: ranks in short form, names without hidden characters, indented lines."""

from __future__ import annotations

from collections.abc import Iterable


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks in short form: ``[0, 1, 2, 5]`` gives ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def name_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as the subject of a sentence: ``rank 2``, ``ranks 0-2, 5``."""
    text = format_ranks(ranks)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def printable(text: str, *, keep: str = "") -> str:
    """Escape every character of a text that is not plainly visible: control and bidirectional characters, lone surrogates.

    Args:
        text: Any text, such as a name from a file.
        keep: Characters to leave as they are: a newline, in a text of several lines whose parts are already printable.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def indent(text: str) -> str:
    """Indent each line by four columns."""
    return "\n".join("    " + line for line in text.rstrip("\n").split("\n"))

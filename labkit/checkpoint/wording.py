"""Numbers, sizes and lists of names, put for people."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """A number with its noun for people: ``1 file``, ``1,024 files``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def bytes_text(size: int) -> str:
    """A size for people: ``1.5 MiB``."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def listed(names: Sequence[str], number: int | None = None, most: int = 3) -> str:
    """The first of some names: ``a, b, c and 13 more``; ``number`` is how many there are, where not all of them are given."""
    more = (len(names) if number is None else number) - len(names[:most])
    return ", ".join(names[:most]) + (f" and {more:,} more" if more else "")


def quoted(text: object) -> str:
    """Return a name or path between quotes for a shell, so that it can be copied whatever is in it or follows."""
    return "'" + str(text).replace("'", "'\"'\"'") + "'"

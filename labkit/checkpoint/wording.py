"""Numbers, sizes and lists of names as text for people."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 file``, ``1,024 files``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def bytes_text(size: int) -> str:
    """Format a size in bytes: ``1.5 MiB``."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def listed(names: Sequence[str], number: int | None = None, most: int = 3) -> str:
    """List the first few names: ``a, b, c and 13 more``; ``number`` is the total if ``names`` does not hold them all."""
    more = (len(names) if number is None else number) - len(names[:most])
    return ", ".join(names[:most]) + (f" and {more:,} more" if more else "")


def quoted(text: object) -> str:
    """Quote a name or path for a shell, so that it can be copied whatever it contains and whatever follows it."""
    return "'" + str(text).replace("'", "'\"'\"'") + "'"

"""Errors that can occur while handouts are made."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.errors import LabkitError


class HandoutError(LabkitError):
    """A handout cannot be made from a notebook."""


class SolutionLeakError(HandoutError):
    """A file for students contains lines of a solution; nothing was handed out.

    Attributes:
        file: The file's name.
        lines: The lines.
    """

    def __init__(self, file: str, lines: Sequence[str]) -> None:
        self.file, self.lines = file, tuple(lines)
        shown = "\n".join(f"    {line}" for line in self.lines[:5])
        count = f"{len(self.lines)} line{'s' if len(self.lines) > 1 else ''}"
        super().__init__(f"{file}, a file for students, would hold {count} of solutions:\n{shown}")

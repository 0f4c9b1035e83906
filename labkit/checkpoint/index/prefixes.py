"""Search for a single prefix change that makes all names match: ``net.layers.0.weight`` and ``layers.0.weight``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import takewhile

from labkit.checkpoint.wording import quoted


@dataclass(frozen=True)
class PrefixChange:
    """A prefix that names have, and the one that they should have; either may be empty."""

    old: str
    new: str

    def apply(self, name: str) -> str:
        """Return a name after the change."""
        return self.new + name.removeprefix(self.old)

    @property
    def rule(self) -> str:
        """Return the change as a line of a rename table."""
        return f"{self.old}* -> {self.new}*"

    @property
    def advice(self) -> str:
        """Return a sentence on what to do."""
        return f"All names fit after one change: echo {quoted(self.rule)} > names.txt, and add --rename names.txt (rules=[...])."


def prefix_change(names: Collection[str], wanted: Collection[str], fits: Callable[[list[str]], bool]) -> PrefixChange | None:
    """Return the smallest change of a common prefix, in whole dotted parts, after which all names fit; None if there is none.

    Args:
        names: The names that do not fit.
        wanted: The names that they should become.
        fits: Returns whether changed names fit.
    """
    if not names or not wanted:
        return None
    changes = [PrefixChange(old, new) for old in _beginnings(names) for new in _beginnings(wanted) if old != new]
    for change in sorted(changes, key=lambda change: len(change.old) + len(change.new)):
        if fits([change.apply(name) for name in names]):
            return change
    return None


def _beginnings(names: Collection[str]) -> list[str]:
    """Return the prefixes common to all names that end at a dot, from the empty one to the longest."""
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    same = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    return ["".join(f"{part}." for part in same[:count]) for count in range(len(same) + 1)]

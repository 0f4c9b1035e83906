"""Keeps tests together in one process: those of a file share its pools, those of a notebook its runs."""

from __future__ import annotations

import re
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

NOTEBOOKS = frozenset(path.stem for path in (Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


class Together(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives a process all tests of one group, in their order, when it has few left."""

    def _split_scope(self, nodeid: str) -> str:
        """Return a test's group; xdist's own schedulers differ in this method only."""
        file, _, name = nodeid.partition("::")
        parameter = re.search(r"\[(\w+)", name)
        return parameter[1] if parameter and parameter[1] in NOTEBOOKS else file

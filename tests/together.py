"""Keeps tests together in one process: those of a file share its pools, those of a notebook its runs."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

from tests.order import group_of


class Together(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """A scheduler that gives a process all tests of one group, in their order, when it has few left."""

    def _split_scope(self, nodeid: str) -> str:
        """Return a test's group; xdist's own schedulers differ only in this method."""
        return group_of(nodeid)

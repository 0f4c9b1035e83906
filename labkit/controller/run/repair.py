"""Repair of a pool's process groups: after a run that has broken them, and when some ranks are replaced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from labkit.base.plain_text import name_ranks
from labkit.base.ranks import RankResults
from labkit.controller.run.interrupts import caught_sigint
from labkit.controller.run.members import Members
from labkit.controller.run.run import Run, RunWait
from labkit.controller.start.deaths import LOST
from labkit.errors import PoolStateError
from labkit.wire.messages import Execute, Failed, Result

# Making new groups takes about 0.03 s on gloo and 1.3 s on NCCL.
REBUILD_LIMIT_S = 60.0
# A user who holds Ctrl-C down means the run and not the repair, unless the repair takes long.
REBUILD_DEAF_S = 10.0
# An interrupted or failed repair can be repeated.
REBUILD_ATTEMPTS = 3
# An idle rank answers within milliseconds.
ASK_S = 2.0


class Repair:
    """Makes the ranks form their process groups anew. It takes part in the count of runs, so no run may be in progress meanwhile.

    Args:
        members: The living ranks.
        world_size: Number of ranks in the pool.
        begin: Begins a run of these ranks under the next number.
        values: Returns the values that a finished run returned.
    """

    def __init__(
        self,
        members: Members,
        world_size: int,
        begin: Callable[[tuple[int, ...]], Run],
        values: Callable[[Run], RankResults[Any]],
    ) -> None:
        self._members, self._world_size, self._begin, self._values = members, world_size, begin, values
        self._obstacle = ""  # why a rank cannot be replaced alone

    def mend(self, run: Run) -> None:
        """Repair what the run has broken, if every rank still lives: process groups, then the objects that use them."""
        if self._members.deaths:
            self.find_obstacle()
            return
        if not (run.failures or run.group_lost or run.left_open or run.uneven):
            return
        began = time.monotonic()
        for _ in range(REBUILD_ATTEMPTS):
            rebuild = self._rebuild()
            if not rebuild.failures or self._members.deaths:
                break
        if rebuild.failures:
            first = next(iter(rebuild.failures.values()))
            self._obstacle = first.headline()
            run.steps.append(f"The process groups could not be rebuilt ({self._obstacle}); pool.restart() gives fresh ranks.")
            return
        mended = self._values(rebuild)
        if any(item["renewed"] for item in mended.values()):
            freed = f"labkit released {name_ranks(run.released)} and" if run.released else "labkit"
            took = time.monotonic() - began
            run.steps.append(f"{freed} rebuilt the process groups in {took:.1f} s. Every rank keeps its variables.")
        elif run.stopped is not None:
            run.steps.append("Every rank keeps its variables.")
        notes: dict[str, list[int]] = {}
        for rank, item in mended.items():
            for note in item["notes"]:
                notes.setdefault(note, []).append(rank)
        run.steps += [note if len(ranks) == len(mended) else f"{name_ranks(tuple(ranks))}: {note}" for note, ranks in notes.items()]

    def replace(self, ranks: tuple[int, ...], timeout_s: float) -> tuple[str, ...]:
        """Replace the processes of some ranks by new ones; the other ranks keep their variables.

        Args:
            ranks: The ranks to replace. They include all dead ones, and at least one rank stays.
            timeout_s: The longest time to wait for the new processes.

        Returns:
            Notes for the ranks that stay, a sentence each.

        Raises:
            WorkerStartError: A new process did not start.
            PoolStateError: The ranks could not form their groups.
        """
        if obstacle := self.find_obstacle(ranks):
            raise PoolStateError(
                f"{name_ranks(ranks)} cannot be replaced: {obstacle}, and new ranks join the one that labkit made. "
                "Nothing was changed; pool.restart() gives fresh ranks and groups."
            )
        rebuild = self._rebuild(ranks)
        if rebuild.failures:
            # The joining rank dies because of the error that the others report.
            first = min(rebuild.failures.values(), key=lambda failure: failure.kind == "died")
            self._obstacle = first.headline()
            self._members.give_up(ranks, f"labkit ended its new process: no groups could be formed ({first.message})")
            raise PoolStateError(
                f"the ranks could not form their groups ({first.message}). "
                f"{name_ranks(rebuild.ranks)} {'keeps its' if len(rebuild.ranks) == 1 else 'keep their'} variables; "
                "pool.restart() gives fresh ranks."
            )
        self._members.await_ready(timeout_s)
        self._obstacle = ""
        return tuple(dict.fromkeys(note for item in self._values(rebuild).values() for note in item["notes"]))

    def ways_back(self, dead: Sequence[int]) -> str:
        """Return advice for the case that ranks have died."""
        lost = any(self._members.deaths[rank].type_name == LOST for rank in dead)
        when, fresh = "When the machine is back: " if lost else "", "pool.restart() gives fresh ranks."
        if len(dead) == self._world_size or self._obstacle:
            return when + fresh + (f" The dead alone cannot be replaced: {self._obstacle}." if self._obstacle else "")
        return f"{when}pool.restart({list(dead)}) replaces {name_ranks(dead)}, the others keep their variables; {fresh}"

    def find_obstacle(self, replaced: tuple[int, ...] = ()) -> str:
        """Ask the ranks that stay what keeps new ones from joining them; empty if nothing does. Later errors repeat it.

        Blocks for ASK_S at most. A rank that does not answer is ignored here; the next run will notice it.
        """
        run = self._begin(tuple(rank for rank in self._members.all_ranks if rank not in replaced))
        self._members.send_work(run.ranks, Execute(run.run_id, run.ranks, "ask"))
        deadline = time.monotonic() + ASK_S
        while run.pending and time.monotonic() < deadline:
            for message, frames in self._members.receive(0.1):
                if isinstance(message, Result) and message.run_id == run.run_id:
                    run.results[message.rank] = message, frames
                elif isinstance(message, Failed) and message.run_id == run.run_id:
                    run.failures[message.rank] = message.failure
        found: dict[str, list[int]] = {}
        for rank, what in self._values(run).items():
            if what:
                found.setdefault(what, []).append(rank)
        parts = [f"the default process group was {what} on {name_ranks(ranks)}" for what, ranks in found.items()]
        self._obstacle = " and ".join(parts) or self._obstacle  # or the error of an earlier attempt
        return " and ".join(parts)

    def _rebuild(self, replaced: tuple[int, ...] = ()) -> Run:
        """Make the ranks form new groups, with new processes in place of those that are replaced."""
        group = self._members.next_group()
        stay = tuple(rank for rank in self._members.all_ranks if rank not in replaced)
        if replaced:
            self._members.start_again(replaced, group)
        rebuild = self._begin(stay)
        self._members.send_work(stay, Execute(rebuild.run_id, stay, "rebuild", group=group))
        wait = RunWait(rebuild, self._members, REBUILD_LIMIT_S, lambda output: None, deaf_s=REBUILD_DEAF_S)
        with caught_sigint(wait.on_sigint):
            return wait.wait()

"""The life of a pool's ranks: start, adoption from an earlier notebook, restart, replacement, end."""

from __future__ import annotations

import atexit
from collections.abc import Callable

from labkit.base.plain_text import name_ranks
from labkit.controller.current import open_pool, refuse_second_pool, starting
from labkit.controller.machines.attach import AttachedSite
from labkit.controller.output import present_screen
from labkit.controller.run.interrupts import held_sigint
from labkit.controller.run.members import Members
from labkit.controller.run.runner import Runner
from labkit.controller.start.world import Site
from labkit.errors import PoolStateError


class Lifetime:
    """The ranks of one pool, across all their restarts.

    Args:
        site: The place where they run.
        start_timeout_s: The longest time that a start may take, in seconds.
        opened: Called when all ranks are ready, after each start.

    Attributes:
        site: The place where they run.
        runner: What runs work on the ranks; None while there are none: before the first start and after the end.
    """

    def __init__(self, site: Site, start_timeout_s: float, opened: Callable[[], None]) -> None:
        self.site, self._start_timeout_s, self._opened = site, start_timeout_s, opened
        self.runner: Runner | None = None

    def begin(self) -> None:
        """Start the ranks for the first time, in place of an open pool. After an error nothing is left running."""
        try:
            if isinstance(self.site, AttachedSite):
                with held_sigint() as stop_if_asked:
                    self.site.prepare(self._start_timeout_s, stop_if_asked)
                self.site.make_plan()
            # Close the open pool only now, so that it is not lost for a pool that cannot run.
            if (other := open_pool()) is not None:
                other.close()
            self._start()
        except BaseException:
            if self.runner is None:  # else the interrupt came when the pool was already open
                self.site.leave()
            raise

    def adopt(self, site: AttachedSite) -> None:
        """Adopt the ranks that wait at the site for a notebook, and wait for a run that is still in progress.

        On an error before the pool is open they go on waiting for another notebook.

        Args:
            site: The site of this object, which has such ranks.
        """
        with held_sigint() as stop_if_asked:
            site.prepare(self._start_timeout_s, stop_if_asked)
            try:
                left = site.nodes.left()
                if not left:
                    site.leave()
                    raise PoolStateError("no rank is left of the earlier pool on its machines. Attach anew: WorkerPool.attach(...)")
                if (other := open_pool()) is not None:
                    other.close()
                stop_if_asked()
                site.make_plan()
                world = site.world(next(iter(left.values())).world)
                site.nodes.adopt_world(world.name)
                members = Members(site.plan.world_size, world)
                members.adopt(left, world, {node.node_rank: node.name for node in site.nodes.nodes})
                runner = self._open(members)
            except BaseException:
                site.abandon()
                raise
        busy = tuple(sorted(rank for found in left.values() for rank in found.busy))
        runner.resume(max(found.run_id for found in left.values()), busy)

    def _start(self) -> None:
        world_size = self.site.plan.world_size
        with starting(world_size), held_sigint() as stop_if_asked:
            self.site.prepare(self._start_timeout_s, stop_if_asked)
            try:
                members = Members(world_size, self.site.open_world())
                members.start(self._start_timeout_s, stop_if_asked)
                self._open(members)
            except BaseException:
                self.site.leave()
                raise

    def _open(self, members: Members) -> Runner:
        self.runner = runner = Runner(members, self.site.plan.world_size)
        self._opened()
        atexit.register(self._at_exit)
        return runner

    def _at_exit(self) -> None:
        if isinstance(self.site, AttachedSite) and self.site.outlives_notebook:
            self.site.abandon()
        else:
            self.close()

    def restart(self, ranks: tuple[int, ...]) -> None:
        """Replace the processes of these ranks by new ones; start all ranks anew if these are all, or if there are none."""
        if self.runner is None or len(ranks) == self.site.plan.world_size:
            self._restart_all()
        else:
            self._replace(self.runner, ranks)

    def _restart_all(self) -> None:
        was_closed = self.runner is None
        if was_closed:
            refuse_second_pool("or close it with labkit.current_pool().close() and restart this one then")
        elif self.site.gone:
            self.close()
        else:  # else ranks would end although their successors cannot be started
            with held_sigint() as stop_if_asked:
                self.site.prepare(self._start_timeout_s, stop_if_asked)
        with held_sigint() as stop_if_asked:
            self._end_ranks()
            try:
                stop_if_asked()
                self._start()
            except BaseException:
                if self.runner is None:
                    self.site.leave()
                raise
        again = "the pool was closed and is open again; " if was_closed else ""
        world_size = self.site.plan.world_size
        have = "is fresh and has" if world_size == 1 else "are fresh and have"
        text = f"{again}{name_ranks(range(world_size))} {have} no variables.\n"
        present_screen().text("stdout", text[0].upper() + text[1:])

    def _replace(self, runner: Runner, ranks: tuple[int, ...]) -> None:
        runner.look_around()
        left = set(runner.dead_ranks) - set(ranks)
        if left:
            raise PoolStateError(
                f"{name_ranks(left)} died as well. Name all dead ranks: pool.restart({sorted(left | set(ranks))})."
            )
        for note in runner.replace(ranks, self._start_timeout_s):
            present_screen().text("stderr", note + "\n")

    def close(self) -> None:
        """End all ranks and release their site."""
        with held_sigint():
            self._end_ranks()
            self.site.leave()

    def _end_ranks(self) -> None:
        runner = self.runner
        if runner is None:
            return
        with runner.alone():
            self.abandon()
            runner.members.close()

    def abandon(self) -> None:
        """Forget the ranks without telling them."""
        self.runner = None
        atexit.unregister(self._at_exit)

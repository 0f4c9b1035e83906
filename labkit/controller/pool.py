"""The pool: one worker process per rank, kept alive between cells."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from labkit.base.plain_text import format_ranks
from labkit.base.ranks import RankResults, RankSpec, parse_ranks
from labkit.controller.current import open_pool, refuse_second_pool, set_open_pool
from labkit.controller.hang.diagnosis import Diagnosis
from labkit.controller.lifetime import Lifetime
from labkit.controller.machines.attach import AttachedSite, Meeting, ShownCommand, earlier_site, local_site, own_address
from labkit.controller.machines.node import NodeStatus
from labkit.controller.output import Screen
from labkit.controller.run import sending
from labkit.controller.run.runner import Runner
from labkit.controller.start import pool_plan
from labkit.controller.start.world import LocalSite, Site
from labkit.errors import InvalidPoolError, PoolStateError, WorkerStartError, raises_here
from labkit.wire.key_file import KeyFile

T = TypeVar("T")

_CLOSE_IT = "close it (pool.close()), or pass replace=True to close it and start this one"


class WorkerPool:
    """One persistent worker process per rank, joined in a process group.

    The call returns when every rank has formed its process group and completed a collective, or raises. The first pool of a process
    waits for one ``import torch`` (seconds); later ones start from the fork server (fractions of a second).

    Ranks: controller.

    Args:
        world_size: The number of ranks.
        device: ``cuda``, ``cpu``, or ``auto``: ``cuda`` if there is a GPU. With a GPU for each rank the ranks use NCCL. With fewer
            GPUs the ranks share them and use gloo through host memory; their times are not those of several GPUs. The pool's own
            line, ``repr(pool)``, says what it uses and why.
        launcher: ``local`` starts the ranks from this process. ``agents`` starts labkit's agents on this machine, which start the
            ranks in the same way as with :meth:`attach` on several machines. :meth:`attach` passes its machines here.
        num_nodes: With ``agents``: simulate that many machines on this one, each with the same number of ranks.
        start_timeout_s: The longest time that the start may take, in seconds.
        replace: Close an open pool first instead of refusing.

    Raises:
        InvalidPoolError: This machine cannot run a pool with these arguments.
        PoolStateError: Another pool is open and ``replace`` is False.
        WorkerStartError: A rank did not start; nothing is left running.
    """

    @raises_here
    def __init__(
        self,
        world_size: int | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        *,
        launcher: Literal["local", "agents"] | AttachedSite = "local",
        num_nodes: int = 1,
        start_timeout_s: float = 180.0,
        replace: bool = False,
    ) -> None:
        if not isinstance(launcher, AttachedSite):
            pool_plan.check_arguments(world_size, device, launcher, num_nodes)
        if not replace:
            refuse_second_pool(_CLOSE_IT)
        site: Site
        if isinstance(launcher, AttachedSite):
            site = launcher
        elif launcher == "agents":
            site = local_site(num_nodes, (world_size or 0) // num_nodes, device)
        else:
            site = LocalSite(pool_plan.make_plan(world_size, device, pool_plan.launcher().count_gpus))
        self._life = Lifetime(site, start_timeout_s, lambda: set_open_pool(self))
        if isinstance(site, AttachedSite) and site.has_ranks:
            self._life.adopt(site)
        else:
            self._life.begin()

    @classmethod
    @raises_here
    def attach(
        cls,
        num_nodes: int,
        workers_per_node: int,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        *,
        listen: str = "tcp://0.0.0.0:*",
        host: str | None = None,
        key_file: str | os.PathLike[str] = "labkit.key",
        linger_s: float | None = None,
        start_timeout_s: float = 600.0,
        replace: bool = False,
    ) -> WorkerPool:
        """Start a pool whose ranks run on other machines, where a scheduler or you start labkit's agents.

        The call opens one authenticated, encrypted port, writes a key file, shows the command to run on each machine, and waits for
        the machines. ``labkit launch`` writes the command as a batch script for SLURM or as a manifest for Kubernetes.

        Ranks: controller. Blocks for at most ``start_timeout_s``.

        Args:
            num_nodes: The number of machines.
            workers_per_node: Ranks on each.
            device: As for a local pool, but ranks on several machines do not share GPUs: ``auto`` means ``cuda`` if every machine
                has a GPU for each of its ranks.
            listen: The address on which this machine listens, ``tcp://INTERFACE:PORT``; port ``*`` takes a free one.
            host: The name or address under which the machines reach this one; None for its address on the network.
            key_file: The path of the key file (mode 0600). Copy it to every machine. It is removed when the pool is closed.
            linger_s: Let the ranks wait that long for a notebook that has gone without closing its pool; :meth:`reattach` returns
                to them. None ends them with the notebook.
            start_timeout_s: How long to wait for the machines and their ranks, in seconds.
            replace: Close an open pool first instead of refusing.

        Raises:
            InvalidPoolError: The arguments make no sense, the address cannot be bound, or the machines lack GPUs.
            PoolStateError: Another pool is open and ``replace`` is False.
            WorkerStartError: A machine did not connect, or a rank did not start; the message names it.
        """
        pool_plan.check_attachment(num_nodes, workers_per_node, device, listen, host, linger_s)
        if not replace:
            refuse_second_pool(_CLOSE_IT)
        path = Path(key_file).absolute()
        other = open_pool()
        if other is not None and isinstance(other._life.site, AttachedSite) and other._life.site.key_file == path:
            other.close()  # the cell is run again: this pool replaces that one and takes over its key file
        interface = listen.removeprefix("tcp://").rpartition(":")[0]
        address = host or (interface if interface in ("127.0.0.1", "localhost") else own_address())
        meeting = Meeting(num_nodes, workers_per_node, listen, address, device, linger_s, on_one_machine=num_nodes == 1)
        site = AttachedSite(meeting, path, ShownCommand(), outlives_notebook=linger_s is not None)
        return cls(launcher=site, start_timeout_s=start_timeout_s, replace=True)

    @classmethod
    @raises_here
    def reattach(
        cls, key_file: str | os.PathLike[str] = "labkit.key", *, start_timeout_s: float = 60.0, replace: bool = False
    ) -> WorkerPool:
        """Return to ranks that an earlier notebook left waiting, with their variables intact.

        The earlier pool was attached with ``linger_s`` on this machine, and its notebook is gone: its kernel was restarted or died.
            If a run is still in progress, this waits for it and shows its output; the run can be interrupted.

        Ranks: controller. Blocks for at most ``start_timeout_s``, and until a run in progress has ended.

        Args:
            key_file: The earlier pool's key file.
            start_timeout_s: How long to wait for the machines, in seconds.
            replace: Close an open pool first instead of refusing.

        Raises:
            InvalidPoolError: There is no such pool, or its port is taken because its notebook still runs.
            PoolStateError: Another pool is open and ``replace`` is False, a machine did not come back in time, or no rank was left.
            RunReport: The run in progress did not finish on every rank. The pool is open: ``labkit.current_pool()``.
        """
        if not replace:
            refuse_second_pool(_CLOSE_IT)
        path = Path(key_file).absolute()
        site = earlier_site(path)
        if path.exists() and KeyFile.read(path).in_use:
            raise InvalidPoolError(f"the notebook of the pool behind {path} still runs. Close it, or restart its kernel.")
        try:
            return cls(launcher=site, start_timeout_s=start_timeout_s, replace=True)
        except WorkerStartError as error:
            raise PoolStateError(
                f"not every machine came back in {start_timeout_s:g} s. Ranks wait {site.meeting.linger_s:g} s for a notebook and "
                f"then end; attach anew: WorkerPool.attach(...). ({error.reason})"
            ) from None

    # ---- what the pool is ----------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._life.site.plan.world_size

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self._life.site.plan.device

    @property
    def devices(self) -> dict[int, str]:
        """The device of each rank: ``cpu``, or the number of its GPU as in ``cuda:1``."""
        return {rank: self._life.site.plan.device_of(rank) for rank in range(self.world_size)}

    @property
    def closed(self) -> bool:
        """True if the pool has been closed."""
        return self._life.runner is None

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        """Ranks whose process has ended."""
        runner = self._life.runner
        return () if runner is None else runner.dead_ranks

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each rank."""
        runner = self._life.runner
        return {} if runner is None else dict(sorted(runner.members.pids.items()))

    @property
    def nodes(self) -> tuple[NodeStatus, ...]:
        """The machines of an attached pool, by node rank; empty for a pool on this machine."""
        runner, site = self._life.runner, self._life.site
        if runner is None or not isinstance(site, AttachedSite):
            return ()
        runner.look_around()
        return site.nodes.statuses()

    @property
    def places(self) -> dict[int, str]:
        """The machine of each rank, if they run on more than one."""
        runner = self._life.runner
        return {} if runner is None else dict(runner.members.places)

    def __repr__(self) -> str:
        if self.closed:
            return f"WorkerPool(world_size={self.world_size}, device={self.device!r}): closed"
        dead = f", dead: {format_ranks(self.dead_ranks)}" if self.dead_ranks else ""
        return f"WorkerPool(world_size={self.world_size}, device={self.device!r}): {self._life.site.plan.describe()}{dead}"

    # ---- running -------------------------------------------------------------------------------------------------

    @raises_here
    def run(
        self, function: Callable[..., T], *args: Any, ranks: RankSpec = None, timeout_s: float | None = None, **kwargs: Any
    ) -> RankResults[T]:
        """Call a function on the ranks and return its results.

        The function and its arguments are pickled by value if they come from the notebook. On the rank the function sees the
        globals it uses here, and the rank's own namespace for names that do not exist here.

        Ranks: controller. The function runs once on each of ``ranks``.

        Args:
            function: The function to call.
            *args: Its positional arguments, equal on all ranks.
            ranks: The ranks to run on; None for all.
            timeout_s: Interrupt the run after this many seconds; None waits without limit.
            **kwargs: Its keyword arguments.

        Returns:
            One value per rank. Tensors on accelerators arrive on the CPU.

        Raises:
            RankFailedError: The function raised on a rank.
            OpenCollectiveError: The function left a collective open that not all ranks have begun.
            WorkerDiedError: A rank's process ended.
            RunTimeoutError: The time limit passed.
            WireError: The function, an argument or a result cannot be pickled.
            PoolStateError: The pool is closed or broken, or a run is in progress.
            InvalidRunError: The function is not callable, or the time limit is not a positive number.
        """
        runner, chosen = self._choose(ranks, timeout_s)
        packed = sending.pack_call(function, args, kwargs, share_memory=runner.members.share_memory)
        return runner.values(runner.execute("call", chosen, timeout_s, packed=packed))

    @raises_here
    def run_cell(
        self,
        source: str,
        *,
        ranks: RankSpec = None,
        timeout_s: float | None = None,
        want_value: bool = False,
        cell_number: int | None = None,
        screen: Screen | None = None,
    ) -> RankResults[Any] | None:
        """Run notebook source on the ranks, as ``%%spmd`` does.

        Ranks: controller. The cell runs in each rank's namespace.

        Args:
            source: The source of a cell, which may use magics, ``!`` and top-level ``await``.
            ranks: The ranks to run on; None for all.
            timeout_s: Interrupt the run after this many seconds.
            want_value: Return the last expression's values instead of displaying them.
            cell_number: The notebook's number for the cell, for tracebacks.
            screen: The screen for the ranks' output; None for the running cell or the terminal.

        Returns:
            The values if ``want_value`` is set, else None.

        Raises:
            SyntaxError: The cell cannot be parsed; nothing was sent.
            RankFailedError: The cell raised on a rank. Further errors as in :meth:`run`.
        """
        runner, chosen = self._choose(ranks, timeout_s)
        sending.check_syntax(source, f"<cell {cell_number}>" if cell_number else "<cell>")
        fields: dict[str, Any] = {"source": source, "want_value": want_value, "cell_number": cell_number}
        run = runner.execute("cell", chosen, timeout_s, screen=screen, **fields)
        return runner.values(run) if want_value else None

    @raises_here
    def push(self, *, ranks: RankSpec = None, timeout_s: float | None = None, **variables: Any) -> None:
        """Set variables in the ranks' namespaces.

        On one machine the data of large tensors is copied once, whatever the number of ranks. Each rank has its own private view
        (copy on write).

        Ranks: controller.

        Args:
            ranks: The ranks to set them on; None for all.
            timeout_s: Interrupt after this many seconds.
            **variables: Names and values.

        Raises:
            WireError: A value cannot be pickled. Further errors as in :meth:`run`.
        """
        runner, chosen = self._choose(ranks, timeout_s)
        packed = sending.pack_variables(variables, share_memory=runner.members.share_memory)
        runner.execute("push", chosen, timeout_s, packed=packed)

    @raises_here
    def pull(self, name: str, *, ranks: RankSpec = None, timeout_s: float | None = None) -> RankResults[Any]:
        """Read a variable, or any expression, from the ranks' namespaces.

        Ranks: controller.

        Args:
            name: A variable's name or an expression such as ``"model.weight.grad"``.
            ranks: The ranks to read from; None for all.
            timeout_s: Interrupt after this many seconds.

        Returns:
            One value per rank. Tensors on accelerators arrive on the CPU.

        Raises:
            SyntaxError: The text is not an expression; nothing was sent.
            RankFailedError: A rank has no such name, or its value cannot be pickled. Further errors as in :meth:`run`.
        """
        runner, chosen = self._choose(ranks, timeout_s)
        compile(name, "<pull>", "eval")
        return runner.values(runner.execute("pull", chosen, timeout_s, source=name))

    def diagnose(self) -> Diagnosis:
        """Ask every rank what it does now and return the cause that holds up the present run.

        The diagnosis also appears by itself when a run hangs, and in the error of a run that was stopped. While a run is in
        progress this can be called from another thread.

        Ranks: controller. Blocks for about 0.5 s at most.

        Returns:
            A sentence and a table; both are shown in a notebook and as text.

        Raises:
            PoolStateError: The pool is closed.
        """
        if (runner := self._life.runner) is None:
            raise PoolStateError("the pool is closed. Start it again with pool.restart().")
        return runner.diagnose()

    def look(self) -> Diagnosis | None:
        """Return what the ranks of the present run did at the last look at them; None if no run is in progress.

        This is for views that are updated again and again. Unlike :meth:`diagnose` it asks the ranks only once in a run. The run
        itself asks them once a second from its second second on.

        Ranks: controller. Safe from any thread. Blocks for at most 1 s.
        """
        runner = self._life.runner
        return None if runner is None else runner.look()

    def interrupt(self) -> None:
        """Interrupt the present run, as Kernel > Interrupt does. Any thread may call this; it returns at once.

        The ranks get KeyboardInterrupt; ranks that wait in a collective are freed from it. Every rank keeps its variables. A second
        call makes the interrupt more forceful.

        Ranks: controller. Does nothing when no run is in progress.
        """
        if (runner := self._life.runner) is not None:
            runner.interrupt()

    # ---- life ----------------------------------------------------------------------------------------------------

    @raises_here
    def restart(self, ranks: RankSpec = None) -> None:
        """Replace workers by new ones. Blocks as long as a start takes: fractions of a second on CPU.

        Without ``ranks`` all variables on the ranks are lost; the pool's settings stay. With ``ranks`` the other ranks keep their
        variables, and new groups are formed. Objects that were sharded over a replaced rank have lost its shard. Notes on what this
        means for the other ranks are shown.

        Ranks: controller.

        Args:
            ranks: The ranks to replace, including all dead ones; None for all.

        Raises:
            PoolStateError: Another pool is open, a run is in progress, a dead rank is missing in ``ranks``, or a machine is out of
                reach; the message says what to do.
            WorkerStartError: A rank did not start.
        """
        self._life.restart(parse_ranks(ranks, self.world_size))

    @raises_here
    def close(self) -> None:
        """End all workers and the processes they started. Blocks for at most about 3 s, or 10 s if agents have to end.

        Ranks: controller.

        Raises:
            PoolStateError: A run is in progress in another thread.
            KeyboardInterrupt: An interrupt arrived in the meantime. The pool is closed.
        """
        self._life.close()

    def abandon(self) -> None:
        """Forget the ranks without telling them. A forked child of this process calls this: the ranks do not belong to it."""
        self._life.abandon()

    def __enter__(self) -> WorkerPool:
        """Use the pool as a context manager: it closes at the end."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the pool."""
        self.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _choose(self, ranks: RankSpec, timeout_s: float | None) -> tuple[Runner, tuple[int, ...]]:
        if (runner := self._life.runner) is None:
            raise PoolStateError("the pool is closed. Start it again with pool.restart(), or make a new labkit.WorkerPool(...).")
        chosen = parse_ranks(ranks, self.world_size)
        sending.check_limit(timeout_s)
        runner.look_around()
        runner.refuse_dead(chosen)
        return runner, chosen

"""Where an attached pool starts its ranks: on machines whose agents come to it."""

from __future__ import annotations

import socket
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from labkit.controller.launch_text import Launch
from labkit.controller.launchers.torchrun import LocalTorchrun
from labkit.controller.nodes import Nodes, NodesWorld
from labkit.controller.output import present_screen
from labkit.controller.plan import PoolPlan
from labkit.controller.tables import arrival_html, arrival_text
from labkit.wire.key_file import KeyFile
from labkit.wire.transport import Keys

LOCAL_LINGER_S = 0.5


class Caller(Protocol):
    """Brings the agents to life."""

    def call(self, launch: Launch) -> None:
        """The notebook listens: agents may come."""

    def changed(self, nodes: Nodes) -> None:
        """A machine has come or gone."""

    def check(self) -> None:
        """Raise where no agent can come any more."""

    def end(self) -> None:
        """The pool is closed."""


class AttachedSite:
    """Machines whose agents come to this notebook.

    Args:
        num_nodes: How many machines.
        workers_per_node: Ranks on each.
        listen: ``tcp://INTERFACE:PORT``.
        host: Where the machines find this one.
        key_file: Where the key file is written.
        rdzv_endpoint: Where torchrun's agents meet; None for this machine.
        caller: Brings the agents to life.
    """

    def __init__(
        self,
        num_nodes: int,
        workers_per_node: int,
        listen: str,
        host: str,
        key_file: Path,
        rdzv_endpoint: str | None,
        caller: Caller,
    ) -> None:
        self.num_nodes, self.workers_per_node, self._listen, self._host = num_nodes, workers_per_node, listen, host
        self._key_file, self._caller = key_file, caller
        self._rdzv_endpoint = rdzv_endpoint or f"{host}:29400"
        self._nodes: Nodes | None = None

    @property
    def nodes(self) -> Nodes:
        """The machines, once :meth:`prepare` has listened."""
        assert self._nodes is not None
        return self._nodes

    def prepare(self, timeout_s: float, stop_if_asked: Callable[[], None]) -> None:
        """Listen, call the agents and wait for them; see :class:`labkit.controller.world.Site`."""
        if self._nodes is None:
            keys = Keys.generate()
            self._nodes = Nodes(self.num_nodes, self.workers_per_node, self._listen, keys)
            try:
                KeyFile.of(keys).write(self._key_file)
                connect = f"tcp://{self._host}:{self._nodes.port}"
                self._caller.call(Launch(self.num_nodes, self.workers_per_node, connect, str(self._key_file), self._rdzv_endpoint))
            except BaseException:
                self.leave()
                raise

        def check() -> None:
            self._caller.check()
            stop_if_asked()

        try:
            self.nodes.await_arrival(timeout_s, check, lambda: self._caller.changed(self.nodes))
        except BaseException:
            self.leave()
            raise

    def open_world(self, plan: PoolPlan) -> NodesWorld:
        """Make every machine ready; see :class:`labkit.controller.world.Site`."""
        return self.nodes.open_world(plan)

    @property
    def begun_anew(self) -> bool:
        """Whether torchrun has started all agents again; see :class:`labkit.controller.world.Site`."""
        return self._nodes is not None and self._nodes.begun_anew and not self._nodes.missing

    def leave(self) -> None:
        """Let the machines go, and stop listening. Another :meth:`prepare` calls them anew."""
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            nodes.leave()
        self._key_file.unlink(missing_ok=True)
        self._caller.end()


class ShownCommand:
    """Shows the reader what to run on each machine, and which machines have come."""

    def __init__(self) -> None:
        self._launch: Launch | None = None
        self._display_id = f"labkit-{uuid.uuid4().hex[:12]}"
        self._shown = False

    def call(self, launch: Launch) -> None:
        """Note the command; it is shown with the table."""
        self._launch, self._shown = launch, False

    def changed(self, nodes: Nodes) -> None:
        """Show the command and the table, or bring them up to date."""
        assert self._launch is not None
        text, html = arrival_text(self._launch, nodes.nodes), arrival_html(self._launch, nodes.nodes)
        present_screen().display({"text/plain": text, "text/html": html}, {}, self._display_id, self._shown)
        self._shown = True

    def check(self) -> None:
        """Nobody here can know."""

    def end(self) -> None:
        """Agents end by themselves."""


def local_site(world_size: int) -> AttachedSite:
    """One machine, this one: torchrun is started here and its agent comes through the loopback device."""
    folder = Path(tempfile.mkdtemp(prefix="labkit-key-"))
    return AttachedSite(1, world_size, "tcp://127.0.0.1:*", "127.0.0.1", folder / "labkit.key", None, LocalTorchrun(folder))


def own_address() -> str:
    """This machine's address on its network, or its name where it has no route to any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()

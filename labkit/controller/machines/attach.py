"""The site of an attached pool: machines whose agents connect to this notebook."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from labkit.base import places
from labkit.controller.machines.agents import LocalAgents
from labkit.controller.machines.launch_text import Launch
from labkit.controller.machines.nodes import Nodes
from labkit.controller.machines.nodes_world import NodesWorld
from labkit.controller.machines.tables import arrival_html, arrival_text
from labkit.controller.output import present_screen
from labkit.controller.start import pool_plan
from labkit.controller.start.pool_plan import PoolPlan
from labkit.errors import InvalidPoolError
from labkit.wire.key_file import KeyFile, read_private, remove_private, write_private
from labkit.wire.transport import Keys


class Caller(Protocol):
    """Starts the agents, or tells the reader how to start them."""

    def begin(self) -> None:
        """Prepare for a start. The key file is written next."""

    def call(self, launch: Launch) -> None:
        """Call the agents: the notebook listens now."""

    def wait(self) -> None:
        """Prepare to wait for agents, the first time or again."""

    def changed(self, nodes: Nodes) -> None:
        """Take note that a machine has come or gone."""

    def check(self) -> None:
        """Raise an error if no agent can come any more."""

    @property
    def gone(self) -> bool:
        """True if the agents have ended and do not come back unless they are called again."""

    @property
    def way_back(self) -> str:
        """Advice, in a sentence, about a machine that is out of reach."""

    def end(self) -> None:
        """Clean up: the pool is closed."""


@dataclass(frozen=True)
class Meeting:
    """The arrangements under which a notebook and its machines meet.

    Attributes:
        num_nodes: The number of machines.
        workers_per_node: Ranks on each; 0 if that is decided when the machines have connected.
        listen: ``tcp://INTERFACE:PORT``.
        host: The address under which the machines reach the notebook.
        device: The device the reader asked for: ``auto``, ``cpu`` or ``cuda``.
        linger_s: How long ranks wait for a notebook that has fallen silent; None for the agents' default.
        on_one_machine: Whether all ranks run on one machine.
    """

    num_nodes: int
    workers_per_node: int
    listen: str
    host: str
    device: str
    linger_s: float | None = None
    on_one_machine: bool = False


class AttachedSite:
    """Machines whose agents connect to this notebook.

    Args:
        meeting: The arrangements under which they meet.
        key_file: The path of the key file.
        caller: Starts the agents.
        keys: The keys of an earlier notebook; None makes new ones.
        outlives_notebook: Whether ranks wait for another notebook when this one is gone.
    """

    def __init__(
        self, meeting: Meeting, key_file: Path, caller: Caller, keys: Keys | None = None, *, outlives_notebook: bool = False
    ) -> None:
        self.meeting, self.key_file, self._caller, self._keys = meeting, key_file, caller, keys
        self.outlives_notebook = outlives_notebook
        self._nodes: Nodes | None = None
        self._written: dict[Path, dict[str, Any]] = {}
        self._plan: PoolPlan | None = None

    @property
    def plan(self) -> PoolPlan:
        """The ranks to start, once :meth:`make_plan` has been called."""
        assert self._plan is not None
        return self._plan

    @property
    def has_ranks(self) -> bool:
        """True if ranks of an earlier notebook wait there."""
        return self._keys is not None

    @property
    def nodes(self) -> Nodes:
        """The machines, once :meth:`prepare` has listened."""
        assert self._nodes is not None
        return self._nodes

    def prepare(self, timeout_s: float, stop_if_asked: Callable[[], None]) -> None:
        """Listen, call the agents and wait for them; see :class:`labkit.controller.start.world.Site`.

        Raises:
            PoolStateError: The machines had connected, and one of them is out of reach now.
        """
        if self._nodes is not None:
            self._nodes.look()
            self._nodes.refuse_missing()
            return
        self._listen()
        self._caller.wait()

        def check() -> None:
            self._caller.check()
            stop_if_asked()

        try:
            self.nodes.await_arrival(timeout_s, check, lambda: self._caller.changed(self.nodes))
        except BaseException:
            self.leave()
            raise

    def _listen(self) -> None:
        meeting, keys = self.meeting, self._keys or Keys.generate()
        size = (meeting.num_nodes, meeting.workers_per_node)
        self._nodes = Nodes(*size, meeting.listen, keys, lambda: self._caller.way_back)
        try:
            self._caller.begin()
            self._refuse_foreign_file()
            agents_half = KeyFile.of(keys)
            agents_half.write(self.key_file)
            self._written[self.key_file] = asdict(agents_half)
            if self.outlives_notebook:
                listen = f"{meeting.listen.rpartition(':')[0]}:{self._nodes.port}"
                own = {name: value.decode() for name, value in asdict(keys).items()}
                own_half = {"keys": own, "meeting": asdict(meeting) | {"listen": listen}}
                write_private(notebook_half(self.key_file), own_half)
                self._written[notebook_half(self.key_file)] = own_half
            connect = f"tcp://{meeting.host}:{self._nodes.port}"
            self._caller.call(Launch(*size, connect, str(self.key_file), meeting.linger_s, on_gpus=meeting.device != "cpu"))
        except BaseException:
            self.leave()
            raise

    def make_plan(self) -> None:
        """Choose the ranks to start, once the machines are there: it depends on their GPUs.

        Raises:
            InvalidPoolError: The machines lack GPUs.
        """
        meeting, nodes = self.meeting, self.nodes
        if meeting.num_nodes > 1 or self.has_ranks:
            self._plan = pool_plan.attached_plan(meeting.num_nodes, meeting.workers_per_node, meeting.device, nodes.num_gpus)
            return
        self._plan = pool_plan.make_plan(meeting.workers_per_node or None, meeting.device, lambda: nodes.num_gpus)
        self.meeting = replace(meeting, workers_per_node=self._plan.world_size)
        nodes.workers_per_node = self._plan.world_size

    def open_world(self) -> NodesWorld:
        """Prepare every machine for a new world; see :class:`labkit.controller.start.world.Site`."""
        return self.world(self.nodes.open_world())

    def world(self, name: str) -> NodesWorld:
        """Return the world of that name on these machines."""
        return NodesWorld(self.plan, self.nodes, name, on_one_machine=self.meeting.on_one_machine)

    @property
    def gone(self) -> bool:
        """True if the agents that were called have ended; see :class:`labkit.controller.start.world.Site`."""
        return self._nodes is not None and self._caller.gone

    def leave(self) -> None:
        """Release the machines and stop listening. Another :meth:`prepare` calls them again."""
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            nodes.leave()
        for path, content in self._written.items():
            remove_private(path, content)  # another pool may own the path by now
        self._written.clear()
        self._caller.end()

    def _refuse_foreign_file(self) -> None:
        """Refuse to overwrite another pool's keys or another file of the reader's."""
        path = self.key_file
        other = "Name another file: key_file=..."
        if path.exists() and KeyFile.read(path).in_use:
            raise InvalidPoolError(f"another notebook uses the key file {path}. {other}")
        if notebook_half(path).exists() and self._keys is None:
            raise InvalidPoolError(
                f"the ranks of an earlier notebook may be waiting for it: WorkerPool.reattach({str(path)!r}) comes back to them. "
                f"If they are gone, remove {notebook_half(path)}. {other}"
            )

    def abandon(self) -> None:
        """Stop listening without telling the machines."""
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            nodes.close()


def earlier_site(key_file: Path) -> AttachedSite:
    """Return the site of an earlier notebook's machines, which are waiting for a notebook.

    Raises:
        InvalidPoolError: The notebook's half of the keys is not beside the key file, or another version of labkit wrote it.
    """
    path = notebook_half(key_file)
    content: dict[str, Any] = read_private(path, "Only a pool attached with linger_s can be attached again.")
    try:
        keys = Keys(**{name: value.encode() for name, value in content["keys"].items()})
        meeting = Meeting(**content["meeting"])
    except (KeyError, TypeError, AttributeError):
        raise InvalidPoolError(f"{path} was not written by this version of labkit. Attach anew: WorkerPool.attach(...)") from None
    return AttachedSite(meeting, key_file, ShownCommand(expected=True), keys, outlives_notebook=True)


def notebook_half(key_file: Path) -> Path:
    """Return the path of the notebook's own half of the keys, with which it can come back."""
    return key_file.with_name(f"{key_file.name}.notebook")


class ShownCommand:
    """Shows the reader the command to run on each machine, and which machines have connected.

    Args:
        expected: The agents already run and only reconnect, so no command is shown.
    """

    gone = False  # it cannot be known here

    def __init__(self, *, expected: bool = False) -> None:
        self._launch: Launch | None = None
        self._expected = expected
        self._display_id, self._shown = "", False

    def begin(self) -> None:
        """Do nothing: the reader has chosen the path of the key file."""

    def call(self, launch: Launch) -> None:
        """Keep the command, to show it with the table."""
        self._launch = launch

    def wait(self) -> None:
        """Start a new table, because it belongs into the cell that waits."""
        self._display_id, self._shown = f"labkit-{uuid.uuid4().hex[:12]}", False

    def changed(self, nodes: Nodes) -> None:
        """Show or update the command and the table. Show nothing if no machine was missing at the first call."""
        if not self._shown and not nodes.missing:
            return
        launch = None if self._expected else self._launch
        text, html = arrival_text(launch, nodes.nodes), arrival_html(launch, nodes.nodes)
        present_screen().display({"text/plain": text, "text/html": html}, {}, self._display_id, self._shown)
        self._shown = True

    def check(self) -> None:
        """Do nothing: it cannot be known here whether agents can still come."""

    @property
    def way_back(self) -> str:
        """The command again, for the machine that is out of reach."""
        assert self._launch is not None
        return f"Wait until it is back, or run its command there again: {self._launch.command()}"

    def end(self) -> None:
        """Do nothing: the agents end by themselves."""


# A local pool never waits for another notebook. But a simulated machine can be cut off and may need a while to reconnect on a busy
# machine.
_LOCAL_LINGER_S, _PLAYED_LINGER_S = 3.0, 10.0


def local_site(num_nodes: int, workers_per_node: int, device: str) -> AttachedSite:
    """Return a site of simulated machines on this one: an agent is started here for each, and connects over the loopback device."""
    folder = Path(places.new_temporary("labkit-key-"))
    linger_s = _PLAYED_LINGER_S if num_nodes > 1 else _LOCAL_LINGER_S
    meeting = Meeting(num_nodes, workers_per_node, "tcp://127.0.0.1:*", "127.0.0.1", device, linger_s, on_one_machine=True)
    return AttachedSite(meeting, folder / "labkit.key", LocalAgents(folder), outlives_notebook=False)


def own_address() -> str:
    """Return this machine's address on its network, or its host name if it has no route to any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()

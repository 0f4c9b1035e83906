"""Where an attached pool starts its ranks: on machines whose agents come to it."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from labkit.controller.launch_text import Launch
from labkit.controller.launchers.agents import LocalAgents
from labkit.controller.nodes import Nodes
from labkit.controller.nodes_world import NodesWorld
from labkit.controller.output import present_screen
from labkit.controller.plan import PoolPlan
from labkit.controller.tables import arrival_html, arrival_text
from labkit.errors import InvalidPoolError
from labkit.wire.key_file import KeyFile, read_private, write_private
from labkit.wire.transport import Keys


class Caller(Protocol):
    """Brings the agents to life."""

    def begin(self) -> None:
        """The key file is about to be written."""

    def call(self, launch: Launch) -> None:
        """The notebook listens: agents may come."""

    def wait(self) -> None:
        """The notebook waits for agents, the first time or again."""

    def changed(self, nodes: Nodes) -> None:
        """A machine has come or gone."""

    def check(self) -> None:
        """Raise where no agent can come any more."""

    @property
    def gone(self) -> bool:
        """Whether they have ended, and do not come back unless they are called again."""

    @property
    def way_back(self) -> str:
        """What the reader can do about a machine that is out of reach, in a sentence."""

    def end(self) -> None:
        """The pool is closed."""


@dataclass(frozen=True)
class Meeting:
    """Where a notebook and its machines meet.

    Attributes:
        num_nodes: How many machines.
        workers_per_node: Ranks on each; 0 where that is decided when the machine is there.
        listen: ``tcp://INTERFACE:PORT``.
        host: Where the machines find this one.
        device: What the reader asked for: ``auto``, ``cpu`` or ``cuda``.
        linger_s: How long ranks wait for a notebook that has fallen silent; None for the agents' default.
        on_one_machine: All ranks run on one.
    """

    num_nodes: int
    workers_per_node: int
    listen: str
    host: str
    device: str
    linger_s: float | None = None
    on_one_machine: bool = False


class AttachedSite:
    """Machines whose agents come to this notebook.

    Args:
        meeting: Where they meet.
        key_file: Where the key file is written.
        caller: Brings the agents to life.
        keys: Those of an earlier notebook; None makes fresh ones.
        outlives_notebook: Ranks wait for another notebook when this one is gone.
    """

    def __init__(
        self, meeting: Meeting, key_file: Path, caller: Caller, keys: Keys | None = None, *, outlives_notebook: bool = False
    ) -> None:
        self.meeting, self.key_file, self._caller, self._keys = meeting, key_file, caller, keys
        self.outlives_notebook = outlives_notebook
        self._nodes: Nodes | None = None
        self._written: KeyFile | None = None

    @property
    def nodes(self) -> Nodes:
        """The machines, once :meth:`prepare` has listened."""
        assert self._nodes is not None
        return self._nodes

    def prepare(self, timeout_s: float, stop_if_asked: Callable[[], None]) -> None:
        """Listen, call the agents and wait for them; see :class:`labkit.controller.world.Site`.

        Raises:
            PoolStateError: They had come, and one of them is out of reach now.
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
            self._written = KeyFile.of(keys)
            self._written.write(self.key_file)
            if self.outlives_notebook:
                listen = f"{meeting.listen.rpartition(':')[0]}:{self._nodes.port}"
                own = {name: value.decode() for name, value in asdict(keys).items()}
                write_private(notebook_half(self.key_file), {"keys": own, "meeting": asdict(meeting) | {"listen": listen}})
            connect = f"tcp://{meeting.host}:{self._nodes.port}"
            self._caller.call(Launch(*size, connect, str(self.key_file), meeting.linger_s, on_gpus=meeting.device != "cpu"))
        except BaseException:
            self.leave()
            raise

    def settle(self, workers_per_node: int) -> None:
        """Now it is known how many ranks each machine gets."""
        self.meeting = replace(self.meeting, workers_per_node=workers_per_node)
        self.nodes.workers_per_node = workers_per_node

    def open_world(self, plan: PoolPlan) -> NodesWorld:
        """Make every machine ready; see :class:`labkit.controller.world.Site`."""
        return self.world(plan, self.nodes.open_world())

    def world(self, plan: PoolPlan, name: str) -> NodesWorld:
        """The world of that name on these machines."""
        return NodesWorld(plan, self.nodes, name, on_one_machine=self.meeting.on_one_machine)

    @property
    def gone(self) -> bool:
        """Whether those that were called have ended; see :class:`labkit.controller.world.Site`."""
        return self._nodes is not None and self._caller.gone

    def leave(self) -> None:
        """Let the machines go, and stop listening. Another :meth:`prepare` calls them anew."""
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            nodes.leave()
        with contextlib.suppress(OSError, InvalidPoolError):
            if self._written is not None and KeyFile.read(self.key_file) == self._written:  # else it is another pool's by now
                self.key_file.unlink()
                notebook_half(self.key_file).unlink(missing_ok=True)
        self._written = None
        self._caller.end()

    def _refuse_foreign_file(self) -> None:
        """Neither another pool's keys nor anything else of the reader's is written over."""
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
        """Stop listening without a word to the machines."""
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            nodes.close()


def earlier_site(key_file: Path) -> AttachedSite:
    """The machines of an earlier notebook, which has left them waiting.

    Raises:
        InvalidPoolError: There is no file of that notebook beside the key file.
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
    """Where the notebook keeps its own half of the keys, with which it can come back."""
    return key_file.with_name(f"{key_file.name}.notebook")


class ShownCommand:
    """Shows the reader what to run on each machine, and which machines have come.

    Args:
        expected: The agents run already, and only come back: no command is shown.
    """

    gone = False  # nobody here can know

    def __init__(self, *, expected: bool = False) -> None:
        self._launch: Launch | None = None
        self._expected = expected
        self._display_id, self._shown = "", False

    def begin(self) -> None:
        """The reader has chosen where."""

    def call(self, launch: Launch) -> None:
        """Note the command; it is shown with the table."""
        self._launch = launch

    def wait(self) -> None:
        """The table belongs into the cell that waits."""
        self._display_id, self._shown = f"labkit-{uuid.uuid4().hex[:12]}", False

    def changed(self, nodes: Nodes) -> None:
        """Show the command and the table, or bring them up to date; nothing where all machines were there from the first look."""
        if not self._shown and not nodes.missing:
            return
        launch = None if self._expected else self._launch
        text, html = arrival_text(launch, nodes.nodes), arrival_html(launch, nodes.nodes)
        present_screen().display({"text/plain": text, "text/html": html}, {}, self._display_id, self._shown)
        self._shown = True

    def check(self) -> None:
        """Nobody here can know."""

    @property
    def way_back(self) -> str:
        """The command once more."""
        assert self._launch is not None
        return f"Wait until it is back, or run its command there again: {self._launch.command()}"

    def end(self) -> None:
        """Agents end by themselves."""


# On this machine nobody comes back to the ranks, but a machine in play may be cut off in play, and connect again on a busy one.
_LOCAL_LINGER_S, _PLAYED_LINGER_S = 3.0, 10.0


def local_site(num_nodes: int, workers_per_node: int, device: str) -> AttachedSite:
    """Machines in play, on this one: an agent is started here for each, and comes through the loopback device."""
    folder = Path(tempfile.mkdtemp(prefix="labkit-key-"))
    linger_s = _PLAYED_LINGER_S if num_nodes > 1 else _LOCAL_LINGER_S
    meeting = Meeting(num_nodes, workers_per_node, "tcp://127.0.0.1:*", "127.0.0.1", device, linger_s, on_one_machine=True)
    return AttachedSite(meeting, folder / "labkit.key", LocalAgents(folder), outlives_notebook=False)


def own_address() -> str:
    """This machine's address on its network, or its name where it has no route to any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()

"""The start of ranks on the machine of an agent, through a fork server of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from labkit.base import torch_caches
from labkit.base.own_python import own_environ, own_python, with_folder
from labkit.wire.node_messages import StartRank
from labkit.wire.spec import WorkerSpec
from labkit.wire.transport import Endpoint
from labkit.worker.groups.addresses import gloo_device, host_of

_END_S = 5.0


class RankStarter:
    """The agent's fork server.

    Attributes:
        connection: The connection to it; what it says is read here.
    """

    def __init__(self) -> None:
        self.connection, self._process = _start_fork_server()

    def send(self, *message: Any) -> None:
        """Send it a request. Do nothing if it has ended: the reader of the connection notices that."""
        try:
            self.connection.send(message)
        except OSError:
            pass

    def wait(self) -> int:
        """Wait until it has ended and return its exit code."""
        return self._process.wait()

    def end(self) -> None:
        """End it: ask, wait, then kill."""
        self.send("stop")
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.connection.close()


def _start_fork_server() -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        own_python("-m", "labkit.worker.start.forkserver", "--fd", str(theirs.fileno())),
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=own_environ(os.environ),
    )
    theirs.close()
    return Connection(ours.detach()), process


def make_spec(tag: StartRank, endpoint: Endpoint, directory: str) -> WorkerSpec:
    """Return what a rank needs to know for its start.

    Args:
        tag: What the notebook has asked for.
        endpoint: Where the agent hears the ranks of this machine.
        directory: The private folder of their world.
    """
    address = tag.group.store.rpartition("/")[0]
    host, port = host_of(address), address.rpartition(":")[2]
    # As under torchrun: ``init_process_group()`` in a cell joins this store instead of opening its own.
    meeting = {"MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environ = tag.defaults | dict(os.environ) | meeting
    if tag.local_world_size < tag.group.world_size and (device := gloo_device(address)):
        # Otherwise gloo takes the address of the host name, which on many machines is the loopback device's.
        environ.setdefault("GLOO_SOCKET_IFNAME", device)
    return WorkerSpec(
        rank=tag.rank,
        local_rank=tag.local_rank,
        local_world_size=tag.local_world_size,
        device=tag.device,
        endpoint=endpoint,
        group=tag.group,
        directory=directory,
        environ=torch_caches.private(environ),
        cwd=os.getcwd(),
        sys_path=tuple(with_folder(sys.path, os.getcwd())),
        joining=tag.joining,
        num_gpus=tag.num_gpus,
    )

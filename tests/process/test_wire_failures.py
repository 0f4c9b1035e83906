"""An end of a wire that fails during construction leaves no thread and no descriptor, and its collection does not block."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import zmq

from labkit.wire import hub, transport
from labkit.wire.hub import Hub, HubLink
from labkit.wire.transport import ControllerWire, Endpoint, Keys, WorkerWire
from tests.process.patience import until

KEYS = Keys.generate()
FULL = OSError(24, "Too many open files")


def refuse(*_: object) -> None:
    raise FULL


def worker_wire(folder: Path) -> WorkerWire:
    # The last of its three addresses is invalid.
    return WorkerWire(0, Endpoint(f"ipc://{folder}/commands", "none", KEYS.server_public, KEYS.client_public, KEYS.client_secret))


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: Hub("tcp://127.0.0.1:*", KEYS),
        lambda folder: Hub("tcp://127.0.0.1:no-port", KEYS),
        lambda folder: HubLink("none", KEYS, "node-0"),
        lambda folder: ControllerWire(str(folder), KEYS),
        lambda folder: ControllerWire(str(folder / "missing"), KEYS),
        worker_wire,
    ],
    ids=[
        "hub, no descriptors",
        "hub, address",
        "link, address",
        "controller, no descriptors",
        "controller, folder",
        "worker, address",
    ],
)
def test_an_end_that_cannot_be_made_leaves_nothing(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "Wake", refuse)
    monkeypatch.setattr(transport, "Wake", refuse)
    me = psutil.Process()
    zmq.Context().term()  # ZeroMQ keeps what its first context has opened
    before = me.num_fds()
    for _ in range(3):
        with pytest.raises((OSError, zmq.ZMQError)):
            make(tmp_path)
    collected = threading.Thread(target=gc.collect, daemon=True)
    collected.start()
    collected.join(20)
    assert not collected.is_alive()
    until(lambda: me.num_fds() <= before, f"the process is back at {before} descriptors", 10)

"""Values travel whole and private; messages arrive in order, at the right thread, on Unix sockets and TCP alike."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
import zmq

from labkit.errors import RankFailure, WireError
from labkit.wire import messages
from labkit.wire.messages import Aborted, Execute, Interrupt, Output, Ready, Result, Shutdown, Stream
from labkit.wire.payload import IN_MESSAGE_BYTES, MemoryFile, Payload, pack, unpack
from labkit.wire.transport import ControllerWire, Endpoint, Keys, WorkerWire

LARGE = IN_MESSAGE_BYTES // 4 + 1000  # float32 elements: certainly not inside the message

DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "complex128",
    "complex64",
    "complex32",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
]


@pytest.fixture(params=[True, False], ids=["memory file", "frames"])
def share_memory(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def sent(value: Any, share_memory: bool) -> Any:
    """Return the value as another process would get it."""
    packed = pack(value, share_memory=share_memory)
    try:
        return unpack(pickle.loads(pickle.dumps(packed.payload)), [bytes(frame) for frame in packed.frames])
    finally:
        packed.close()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0)

    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (3, LARGE)], ids=str)
def test_tensor_of_every_dtype_and_shape_arrives_bit_for_bit(dtype: str, shape: tuple[int, ...], share_memory: bool) -> None:
    kind = getattr(torch, dtype)
    size = int(np.prod(shape, dtype=int))
    raw = torch.arange(size * torch.empty((), dtype=kind).element_size(), dtype=torch.int64).to(torch.uint8)
    tensor = (raw % 2).to(torch.bool)[:size].reshape(shape) if kind is torch.bool else raw.view(kind).reshape(shape)
    assert same_bits(sent(tensor, share_memory), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2, torch.uint16])
@pytest.mark.parametrize("size", [8, LARGE])
def test_views_of_one_storage_stay_views_of_one_storage(dtype: torch.dtype, size: int, share_memory: bool) -> None:
    base = torch.zeros(size, dtype=dtype)
    got = sent({"base": base, "tail": base[4:], "grid": base[:8].view(2, 4).t()}, share_memory)
    got["base"][5] = 1
    assert got["tail"][1].float() == 1
    assert got["grid"][1, 1].float() == 1
    assert got["grid"].stride() == (1, 4)
    assert got["tail"].storage_offset() == 4


@pytest.mark.parametrize("size", [8, LARGE])
def test_what_arrives_is_writable_and_changes_nothing_here(size: int, share_memory: bool) -> None:
    tensor, array = torch.zeros(size), np.zeros(size)
    got_tensor, got_array = sent((tensor, array), share_memory)
    got_tensor += 1
    got_array += 1
    assert tensor.sum() == 0
    assert array.sum() == 0


def test_two_receivers_of_one_payload_do_not_see_each_other() -> None:
    packed = pack(torch.zeros(LARGE), share_memory=True)
    first, second = unpack(packed.payload), unpack(packed.payload)
    packed.close()
    first.fill_(1)
    assert second.sum() == 0
    assert first.sum() == LARGE


def test_same_tensor_twice_is_one_tensor(share_memory: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    got = sent([weight, {"again": weight}], share_memory)
    assert got[0] is got[1]["again"]
    assert isinstance(got[0], torch.nn.Parameter)


def test_frozen_and_grad_requiring_tensors_keep_what_they_require(share_memory: bool) -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    leaf = torch.ones(2, requires_grad=True)
    got_frozen, got_leaf = sent((frozen, leaf), share_memory)
    assert not got_frozen.requires_grad
    assert got_leaf.requires_grad


def test_module_arrives_with_its_tied_weights_tied(share_memory: bool) -> None:
    module = torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4, bias=False))
    module[1].weight = module[0].weight
    got = sent(module, share_memory)
    assert got[1].weight is got[0].weight
    assert torch.equal(got[1].weight, module[1].weight)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(2, 3, device="meta"),
        torch.view_as_complex(torch.ones(3, 2)).conj(),
        torch.ones(3, dtype=torch.complex64).imag,
        torch.ones(1).expand(5),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=["sparse", "meta", "conj", "imag", "expanded", "channels last"],
)
def test_unusual_tensor_arrives_as_it_was(tensor: torch.Tensor, share_memory: bool) -> None:
    got = sent(tensor, share_memory)
    assert (got.dtype, got.shape, got.layout, got.device) == (tensor.dtype, tensor.shape, tensor.layout, tensor.device)
    if not (tensor.is_sparse or tensor.is_meta):
        assert torch.equal(got, tensor)
        assert got.stride() == tensor.stride()


def test_arrays_and_tables_arrive_as_they_were(share_memory: bool) -> None:
    value = OrderedDict(
        fortran=np.asfortranarray(np.arange(LARGE * 2.0).reshape(2, -1)),
        scalar=np.array(3, dtype=np.int8),
        empty=np.zeros((0, 3)),
        objects=np.array(["a", None], dtype=object),
        table=pd.DataFrame({"step": np.arange(LARGE), "loss": 0.5}),
        text="é" * 1000,
        raw=b"\x00\xff" * LARGE,
    )
    got = sent(value, share_memory)
    assert list(got) == list(value)
    assert got["fortran"].flags.f_contiguous
    for name in ("fortran", "scalar", "empty", "objects"):
        assert got[name].dtype == value[name].dtype
        assert np.array_equal(got[name], value[name])
    assert got["table"].equals(value["table"])
    assert (got["text"], got["raw"]) == (value["text"], value["raw"])


def test_small_buffers_travel_in_the_message_and_large_ones_do_not() -> None:
    small, large = pack(torch.zeros(10), share_memory=True), pack(torch.zeros(LARGE), share_memory=True)
    framed = pack(torch.zeros(LARGE), share_memory=False)
    assert small.memory is None
    assert len(large.payload.data) < 1000
    assert large.payload.size_bytes >= LARGE * 4
    assert [frame.nbytes for frame in framed.frames] == [LARGE * 4]
    large.close()


def test_closing_a_payload_frees_its_file_and_leaves_the_receivers_their_data() -> None:
    packed = pack(torch.ones(LARGE), share_memory=True)
    assert packed.memory is not None
    path = packed.memory.path
    got = unpack(packed.payload)
    packed.close()
    packed.close()
    assert not os.path.exists(path)
    assert got.sum() == LARGE


def test_memory_file_takes_more_than_one_write() -> None:
    file = MemoryFile(3)
    file.write(0, memoryview(b"ab"))
    file.write(2, memoryview(b"c"))
    assert Path(file.path).read_bytes() == b"abc"
    file.close()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (threading.Lock(), "a value of type _thread.lock"),
        ((number for number in range(3)), "a value of type builtins.generator"),
        ({"deep": [threading.Lock()]}, "cannot pickle '_thread.lock' object"),
    ],
    ids=["lock", "generator", "nested"],
)
def test_value_that_cannot_travel_is_refused_with_its_type_and_what_to_do(value: Any, says: str) -> None:
    with pytest.raises(WireError, match="create the object on the ranks") as caught:
        pack(value, share_memory=True)
    assert says in str(caught.value)


def test_refused_value_leaves_no_memory_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(WireError):
            pack([torch.zeros(LARGE), threading.Lock()], share_memory=True)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- messages --------------------------------------------------------------------------------------------------------


def test_every_message_is_frozen_and_survives_pickling() -> None:
    group = messages.GroupSpec("/tmp/store", 1, 2)
    examples: list[Any] = [
        Execute(1, (0, 1), "call", payload=Payload(b"x", (b"y", 0)), group=group),
        Shutdown(),
        Interrupt(3),
        messages.Abort(3),
        messages.Inspect(4),
        messages.Release(5),
        Ready(0, 17, "host", "cpu"),
        Output(0, 1, (Stream("stdout", "a"), messages.Display("display", {"text/plain": "b"}))),
        Result(0, 1, None),
        messages.Failed(0, 1, RankFailure(0, "exception", "ValueError", "boom")),
        messages.Bye(0),
        Aborted(0, 1),
        messages.Inspection(0, 1, messages.RankReport(None, collectives=(messages.RecordedCollective(1, "all_reduce", "0"),))),
    ]
    alternatives = (*messages.ToMain.__args__, *messages.ToControl.__args__, *messages.FromWorker.__args__)
    assert {type(example) for example in examples} == set(alternatives)
    for example in examples:
        assert pickle.loads(pickle.dumps(example)) == example
        assert type(example).__dataclass_params__.frozen


# ---- transport -------------------------------------------------------------------------------------------------------


@pytest.fixture
def controller() -> Iterator[ControllerWire]:
    with tempfile.TemporaryDirectory(prefix="w") as folder:
        wire = ControllerWire(folder, Keys.generate())
        yield wire
        wire.close()


class Peer(WorkerWire):
    """A rank's end, its control thread sitting in its socket as in a real worker."""

    def __init__(self, rank: int, endpoint: Endpoint) -> None:
        super().__init__(rank, endpoint)
        self.heard: list[Any] = []
        self.announce("control", Aborted(rank, 0))
        self.announce("main", Ready(rank, os.getpid(), "host", "cpu"))
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        try:
            while True:
                self.heard.append(self.receive_control())
        except zmq.ZMQError:
            self.close_control()

    def close(self) -> None:
        super().close()
        self._thread.join(5)
        assert not self._thread.is_alive()


@pytest.fixture
def worker(controller: ControllerWire) -> Iterator[Peer]:
    peer = Peer(3, controller.endpoint)
    receive(controller, 2)
    yield peer
    peer.close()


def receive(controller: ControllerWire, count: int) -> list[tuple[Any, list[bytes]]]:
    got: list[tuple[Any, list[bytes]]] = []
    deadline = time.monotonic() + 10
    while len(got) < count and time.monotonic() < deadline:
        got += controller.receive(0.1)
    assert len(got) == count
    return got


def test_work_reaches_the_main_thread_with_its_frames(controller: ControllerWire, worker: Peer) -> None:
    controller.send((3,), "main", Execute(1, (3,), "cell", "1 + 1"), (memoryview(b"frame"),))
    message, frames = worker.receive_main()
    assert message == Execute(1, (3,), "cell", "1 + 1")
    assert frames == [b"frame"]


def test_control_message_reaches_the_control_thread_while_the_main_thread_is_busy(controller: ControllerWire, worker: Peer) -> None:
    controller.send((3,), "main", Execute(1, (3,), "cell", "while True: pass"))
    controller.send((3,), "control", Interrupt(1))
    deadline = time.monotonic() + 10
    while not worker.heard and time.monotonic() < deadline:
        time.sleep(0.005)
    assert worker.heard == [Interrupt(1)]


def test_result_never_overtakes_the_output_before_it(controller: ControllerWire, worker: Peer) -> None:
    count = 1000  # far more than fits into the queue

    def write() -> None:
        for number in range(count):
            worker.send_event(Output(3, 1, (Stream("stdout", f"{number}\n"),)))
        worker.send_event(Result(3, 1, None), (memoryview(b"frame"),))

    thread = threading.Thread(target=write)
    thread.start()
    got = receive(controller, count + 1)
    thread.join(5)
    assert [message.items[0].text for message, _ in got[:-1]] == [f"{number}\n" for number in range(count)]
    assert got[-1] == (Result(3, 1, None), [b"frame"])


def test_a_rank_that_is_not_connected_keeps_no_other_from_its_message(controller: ControllerWire, worker: Peer) -> None:
    controller.send((4, 3), "main", Shutdown())
    assert worker.receive_main() == (Shutdown(), [])


def test_wake_ends_a_wait_at_once(controller: ControllerWire) -> None:
    threading.Timer(0.05, controller.wake).start()
    began = time.monotonic()
    assert controller.receive(30.0) == []
    assert time.monotonic() - began < 10


def test_wakes_without_number_do_not_block(controller: ControllerWire) -> None:
    for _ in range(100_000):
        controller.wake()
    assert controller.receive(1.0) == []


def test_peer_without_the_pools_key_is_not_heard(controller: ControllerWire, worker: Peer) -> None:
    foreign = Keys.generate()
    known = controller.endpoint
    endpoint = Endpoint(known.commands, known.events, known.server_public, foreign.client_public, foreign.client_secret)
    intruder = Peer(3, endpoint)
    intruder.send_event(Output(3, 1, (Stream("stdout", "evil"),)))
    worker.send_event(Output(3, 1, (Stream("stdout", "good"),)))
    assert [message.items[0].text for message, _ in receive(controller, 1)] == ["good"]
    assert controller.receive(0.2) == []
    intruder.close()


def test_closing_twice_is_harmless(controller: ControllerWire) -> None:
    controller.close()
    controller.close()


def test_worker_ends_at_once_while_its_control_thread_listens(controller: ControllerWire) -> None:
    for rank in range(20):
        peer = Peer(rank, controller.endpoint)
        began = time.monotonic()
        peer.close()
        assert time.monotonic() - began < 1.0


def test_local_wire_opens_no_port() -> None:
    before = _tcp_listeners()
    with tempfile.TemporaryDirectory(prefix="w") as folder:
        wire = ControllerWire(folder, Keys.generate())
        assert _tcp_listeners() == before
        wire.close()


def _tcp_listeners() -> int:
    return sum(connection.status == psutil.CONN_LISTEN for connection in psutil.Process().net_connections("tcp"))

"""Pickles that reach code by a detour, hide their contents, or need work out of proportion to their length."""

from __future__ import annotations

import os
import pickle
import re
import struct
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.checkpoint import Reader, migrate, open_checkpoint, verify
from labkit.checkpoint.errors import CheckpointError, CheckpointFormatError, UnsafeCheckpointError
from labkit.checkpoint.pickles import safe_pickle
from labkit.checkpoint.pickles.allow_list import RECORD_NAMES
from labkit.checkpoint.views.describe import describe
from tests.matrix import matrix
from tests.unit.hostile_pickles import (
    assemble,
    call,
    dcp_folder,
    doubled,
    get,
    line_name,
    name,
    storage,
    text,
    torch_file,
)

# The processor time that reading a file of one or two megabytes may take.
SECONDS = 5.0


@contextmanager
def soon() -> Iterator[None]:
    begin = time.process_time()
    yield
    assert time.process_time() - begin < SECONDS


# -- names that lead to code -------------------------------------------------------------------------------------------------

MODULES = sorted({module for module, _ in RECORD_NAMES} | {"torch.distributed.checkpoint.filesystem", "torch._utils"})
DETOURS: dict[str, Callable[[str], bytes]] = {
    "a dotted name": lambda module: name(module, "os.system"),
    "a dotted name in a line": lambda module: line_name(module, "os.system"),
    "a module's builtins": lambda module: name(module, "__builtins__.exec"),
    "a function of the module": lambda module: name(module, "system"),
    "an attribute of a class": lambda module: call(line_name("builtins", "getattr"), known_class(module), text("__init__")),
    "an attribute of a member": lambda module: call(
        line_name("builtins", "getattr"),
        call(line_name("builtins", "getattr"), known_class(module), text("__init__")),
        text("__globals__"),
    ),
}


def known_class(module: str) -> bytes:
    """Push a listed class, of this module if it has one."""
    found = next((qualname for other, qualname in sorted(RECORD_NAMES) if other == module), None)
    return name(module, found) if found else name("torch.distributed.device_mesh", "DeviceMesh")


@pytest.mark.parametrize("detour", DETOURS)
@pytest.mark.parametrize("module", MODULES)
def test_s3_no_name_of_a_listed_module_leads_to_code(tmp_path: Path, module: str, detour: str) -> None:
    data = assemble(call(DETOURS[detour](module), text("true")))
    for path in (torch_file(tmp_path / "x.pt", data), dcp_folder(tmp_path / "dcp", data)):
        with pytest.raises(UnsafeCheckpointError, match="Nothing was run"):
            open_checkpoint(path)
        assert "unsafe" in {finding.code for finding in verify(path).findings}


def test_s3_the_dotted_name_that_torch_would_run_is_named(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    data = assemble(call(name("torch.distributed.checkpoint.filesystem", "os.system"), text(f"touch {ran}")))
    with pytest.raises(UnsafeCheckpointError) as caught:
        open_checkpoint(dcp_folder(tmp_path / "dcp", data))
    assert caught.value.names == ("torch.distributed.checkpoint.filesystem.os.system",)
    assert not ran.exists()
    # The trap itself: when this fails, torch reads .metadata with a restricted unpickler now.
    with pytest.raises(BaseException):  # noqa: B017, PT011
        dcp.load({"a": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert ran.exists()


def test_s3_a_file_that_asks_for_thousands_of_names_is_refused_in_a_short_message(tmp_path: Path) -> None:
    data = assemble(*(name(f"module{number}", "function") + b"0" for number in range(5000)), b"N")
    with pytest.raises(UnsafeCheckpointError, match=r"and \d+ more") as caught:
        open_checkpoint(torch_file(tmp_path / "x.pt", data))
    assert len(str(caught.value)) < 1000


@pytest.fixture(name="ranks")
def ranks_fixture() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (_StridedShard(0, split_factor=4), Shard(0)), (Shard(1), Shard(1))],
    ids=str,
)
@pytest.mark.usefixtures("ranks")
def test_s3_dtensors_of_each_mesh_are_read_by_exact_names(tmp_path: Path, placements: tuple[Placement, ...], protocol: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(16.0 * 8).reshape(16, 8)
    parts = [DTensor.from_local(whole, mesh, [Replicate()] * 2, run_check=False).redistribute(mesh, placements)]
    for sub in (mesh["tp"], mesh._flatten("all")):
        parts.append(DTensor.from_local(whole, sub, [Replicate()], run_check=False).redistribute(sub, [Shard(0)]))
    torch.save(
        {str(index): torch.nn.Parameter(part) for index, part in enumerate(parts)}, tmp_path / "x.pt", pickle_protocol=protocol
    )
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    with Reader(checkpoint) as reader:
        for index, part in enumerate(parts):
            entry = checkpoint.tensors[str(index)]
            (chunk,) = entry.chunks
            assert torch.equal(reader.chunk(entry, chunk), part.to_local())
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            assert torch.equal(whole[box], part.to_local())


def test_s3_names_of_old_and_new_versions_are_data(tmp_path: Path) -> None:
    old = "torch.distributed._tensor"
    listed = [
        ("torch.distributed.device_mesh", "DeviceMesh"),
        (f"{old}.device_mesh", "DeviceMesh"),
        (f"{old}.placement_types", "DTensorSpec"),
        ("torch.distributed._mesh_layout", "_FlatLayout"),
        ("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry"),
        ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor.ProcessGroupState"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST"),
    ]
    for module, qualname in listed:
        for data in (name(module, qualname), member(module, qualname)):
            value, unknown = safe_pickle.load(assemble(data), "x.pkl")
            assert (value.name, unknown) == (f"{module}.{qualname}", ())


def member(module: str, qualname: str) -> bytes:
    """Push a name as protocol 2 and Python 3.11 do: a name with a dot is an attribute of a class."""
    outer, *inner = qualname.split(".")
    pushed = line_name(module, outer)
    for part in inner:
        pushed = call(line_name("builtins", "getattr"), pushed, text(part))
    return pushed


@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last, torch.preserve_format])
@pytest.mark.parametrize("protocol", [2, 4])
def test_s3_members_of_enums_are_data(format_: torch.memory_format, protocol: int) -> None:
    data = pickle.dumps(TensorProperties(memory_format=format_), protocol=protocol)
    value, unknown = safe_pickle.load(data, "x.pkl")
    assert unknown == ()
    assert value.state["state"][0] == torch.float32


@pytest.mark.usefixtures("ranks")
def test_a_partial_dtensor_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (8,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    torch.save({"sum": partial, "weight": torch.ones(2)}, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert list(checkpoint.tensors) == ["weight"]
    assert [(finding.code, finding.where) for finding in verify(tmp_path / "x.pt").findings] == [("unsupported", "sum")]


@pytest.mark.usefixtures("ranks")
def test_a_split_factor_that_the_mesh_does_not_give_is_refused(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    torch.save({"w": DTensor.from_local(torch.ones(2, 4), mesh, [_StridedShard(0, split_factor=2), Shard(0)])}, tmp_path / "x.pt")
    with pytest.raises(CheckpointFormatError, match="split factor of 2"):
        open_checkpoint(tmp_path / "x.pt")


# -- what is listed is what torch would give ----------------------------------------------------------------------------------


def test_s16_an_ordered_dict_whose_items_are_replaced_is_refused(tmp_path: Path) -> None:
    entries = b"(" + text("hidden") + b"K\x01u"
    for attribute in ("items", "keys", "__iter__", "__class__"):
        data = assemble(call(line_name("collections", "OrderedDict")), entries, b"}" + text(attribute) + b"]s" + b"b")
        for path in (torch_file(tmp_path / "x.pt", data), dcp_folder(tmp_path / "dcp", data)):
            with pytest.raises(CheckpointFormatError, match="replaces a method of an OrderedDict"):
                open_checkpoint(path)
            assert not verify(path).ok


def test_s16_attributes_of_a_state_dict_that_torch_writes_hide_nothing(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert isinstance(state, OrderedDict)
    assert state._metadata
    torch.save(state, tmp_path / "x.pt")
    assert list(open_checkpoint(tmp_path / "x.pt").tensors) == list(state)


def test_s16_a_second_state_of_a_record_is_refused() -> None:
    metadata = line_name("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81"
    first, second = (b"}" + text(key) + b"}sb" for key in ("state_dict_metadata", "planner_data"))
    with pytest.raises(CheckpointFormatError, match=r"state of a .*Metadata twice"):
        safe_pickle.load(assemble(metadata, first, second), "x.pkl")


@pytest.mark.parametrize("kind", ["tensor", "dict", "list"])
def test_s16_a_state_of_what_has_none_is_refused(tmp_path: Path, kind: str) -> None:
    tensor = call(line_name("torch._utils", "_rebuild_tensor_v2"), storage(), b"K\0", b")", b")", b"\x89", b"}")
    data = assemble({"tensor": tensor, "dict": b"}", "list": b"]"}[kind], b"(K\x01K\x02tb")
    with pytest.raises(CheckpointFormatError, match="state of something that has none"):
        open_checkpoint(torch_file(tmp_path / "x.pt", data))


# -- work out of proportion ---------------------------------------------------------------------------------------------------

PAIR = b"\x86"
SETS = {"set": line_name("builtins", "set"), "frozenset": line_name("builtins", "frozenset")}
BOMBS = {
    "a doubled tuple as a key": doubled(b"K\x01\x85", PAIR, 50) + b"}" + get(49) + b"Ns",
    "a key of a setitem": doubled(b"K\x01\x85", PAIR, 50) + b"\x94}" + get(50) + b"Ns",
    "a key among several": doubled(b"K\x01\x85", PAIR, 50) + b"}(" + get(50) + b"Nu",
    "an item of a set": doubled(b"K\x01\x85", PAIR, 50) + b"\x8f(" + get(50) + b"\x90",
    "an item of a frozenset": doubled(b"K\x01\x85", PAIR, 50) + b"(" + get(50) + b"\x91",
    "an item of a called set": doubled(b"K\x01\x85", PAIR, 50) + call(SETS["set"], get(50) + b"\x85"),
    "a key of a called OrderedDict": doubled(b"K\x01\x85", PAIR, 50)
    + call(line_name("collections", "OrderedDict"), get(50) + b"N\x86\x85"),
    "a deep tuple as a key": b"}" + b"K\x01" + b"\x85" * 200_000 + b"Ns",
    "a huge number as a key": b"}" + b"\x8b" + struct.pack("<I", 100_000) + b"\x7f" * 100_000 + b"Ns",
    "long numbers of one hash": b"}("
    + b"".join(b"\x8a\x0a" + (k * (2**61 - 1)).to_bytes(10, "little") + b"N" for k in range(5000))
    + b"u",
    "pairs of numbers of one hash": line_name("builtins", "complex")
    + b"\x940}("
    + b"".join(
        get(0) + b"J" + struct.pack("<i", -1_000_003 * k) + b"J" + struct.pack("<i", k) + b"\x86RN" for k in range(-2000, 2000)
    )
    + b"u",
    "a memo number far away": b"K\x01r" + struct.pack("<I", 0xFFFFFFF0),
    "an early memo number again": b"K\x01\x94K\x02q\x00",
    "a long list copied over and over": b"](" + b"K\x01" * 20_000 + b"e\x94" + (call(SETS["set"], get(0)) + b"0") * 20_000,
    "bytes copied over and over": text("x" * 20_000)
    + b"\x94"
    + (call(line_name("_codecs", "encode"), get(0), text("latin1")) + b"0") * 5_000,
    "arguments passed over and over": b"("
    + b"K\x01" * 20_000
    + b"t\x94"
    + (line_name("types", "SimpleNamespace") + get(0) + b"R0") * 5_000,
    "a bytearray of a length": call(line_name("builtins", "bytearray"), b"J\xff\xff\xff\x7f"),
    "bytes of a length": call(line_name("builtins", "bytes"), b"J\xff\xff\xff\x7f"),
    "a set of a range": call(SETS["set"], call(line_name("builtins", "range"), b"J\xff\xff\xff\x7f")),
    "bytes beyond the end": b"\x8e" + struct.pack("<Q", 1 << 50),
}


# Such a pickle is read while the collector pauses, and may cost more.
LARGE = "past the first megabyte"


@pytest.mark.parametrize(("bomb", "size"), [*((bomb, "as it is") for bomb in BOMBS), *matrix(*((bomb, LARGE) for bomb in BOMBS))])
def test_s9_a_pickle_that_asks_for_too_much_is_refused_at_once(tmp_path: Path, bomb: str, size: str) -> None:
    padding = b"" if size == "as it is" else b"B" + struct.pack("<I", 1 << 20) + bytes(1 << 20) + b"0"
    data = assemble(padding, BOMBS[bomb])
    for path in (torch_file(tmp_path / "x.pt", data), dcp_folder(tmp_path / "dcp", data)):
        with soon(), pytest.raises(CheckpointFormatError):
            open_checkpoint(path)
    with soon():
        assert not verify(tmp_path / "x.pt").ok


def test_s9_a_chain_of_attributes_is_one_unknown_name(tmp_path: Path) -> None:
    start = line_name("types", "SimpleNamespace")
    getattr_ = line_name("builtins", "getattr")
    data = assemble((getattr_ + b"(") * 20_000, start, (text("a" * 90) + b"tR") * 20_000)
    with soon(), pytest.raises(UnsafeCheckpointError) as caught:
        open_checkpoint(torch_file(tmp_path / "x.pt", data))
    assert caught.value.names == ("types.SimpleNamespace." + "a" * 90,)


def shared_dicts(left: str, right: str) -> bytes:
    """Push a dict that holds the one before twice, fifty deep."""
    steps = (b"}(" + text(left) + get(number) + text(right) + get(number) + b"u\x94" for number in range(50))
    return b"}" + text("a") + b"}s\x94" + b"".join(steps)


LEAVES = {
    "nested dicts": shared_dicts("l", "r"),
    "dicts with long keys": shared_dicts("l" * 250, "r" * 250),
    "lists with a dict": b"](}e\x94" + b"".join(b"](" + get(number) + get(number) + b"e\x94" for number in range(50)),
}


@pytest.mark.parametrize("leaves", LEAVES)
def test_s9_two_to_the_fifty_leaves_are_refused_at_once(tmp_path: Path, leaves: str) -> None:
    path = torch_file(tmp_path / "x.pt", assemble(LEAVES[leaves]))
    with soon(), pytest.raises(CheckpointFormatError, match=r"x\.pt.*by repeating its parts"):
        open_checkpoint(path)
    assert not verify(path).ok


def test_s9_two_to_the_fifty_numbers_in_one_value_are_one_short_line(tmp_path: Path) -> None:
    lists = b"](K\x01e\x94" + b"".join(b"](" + get(n) + get(n) + b"e\x94" for n in range(50))
    path = torch_file(tmp_path / "x.pt", assemble(lists + b"0}" + text("v") + get(50) + b"s"))
    with soon():
        checkpoint = open_checkpoint(path)
        assert len(str(describe(checkpoint)["values"])) < 500
        with Reader(checkpoint) as reader:
            assert len(reader.value("v")) == 2


def test_s9_what_a_training_state_shares_is_listed_under_each_name(tmp_path: Path) -> None:
    shared = {f"weight.{number}": torch.ones(2) for number in range(100)}
    torch.save({f"copy.{number}": shared for number in range(10)}, tmp_path / "x.pt")
    assert len(open_checkpoint(tmp_path / "x.pt").tensors) == 1000


def test_s9_arrays_that_repeat_the_same_bytes_are_refused(tmp_path: Path) -> None:
    array = pickle.dumps(np.zeros(200_000, dtype=np.uint8), protocol=4)
    state = {"v": [np.zeros(1 << 16, dtype=np.uint8)] * 3, "one": np.arange(3)}
    torch.save(state, tmp_path / "ok.pt")
    with Reader(open_checkpoint(tmp_path / "ok.pt")) as reader:
        assert [len(part) for part in reader.value("v")] == [1 << 16] * 3
    assert len(array) > 200_000
    core = line_name("numpy._core.multiarray", "_reconstruct")
    made = call(core, line_name("numpy", "ndarray"), b"K\0\x85", text("b"))
    dtype = call(line_name("numpy", "dtype"), text("u1"), b"\x89", b"\x88")
    data = b"B" + struct.pack("<I", 1 << 16) + bytes(1 << 16) + b"\x940" + dtype + b"\x940"
    many = (made + b"(K\x01J" + struct.pack("<i", 1 << 16) + b"\x85" + get(1) + b"\x89" + get(0) + b"tb") * 3000
    path = torch_file(tmp_path / "x.pt", assemble(data, b"}", text("v"), b"](", many, b"es"))
    with soon(), Reader(open_checkpoint(path)) as reader, pytest.raises(CheckpointFormatError, match="repeat the same bytes"):
        reader.value("v")


def test_s9_chunks_that_share_one_list_are_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.metadata import TensorProperties as Properties

    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))] * 20_000
    tensors = {f"t{n}": TensorStorageMetadata(Properties(), torch.Size([1]), chunks) for n in range(2000)}
    with soon(), pytest.raises(CheckpointFormatError, match="by repeating their parts"):
        open_checkpoint(dcp_folder(tmp_path, pickle.dumps(Metadata(tensors, {}, {}))))


def test_s9_nothing_is_hidden_by_a_long_message(tmp_path: Path) -> None:
    data = assemble(call(line_name("_codecs", "encode"), text("x"), text("y" * 100_000)))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(torch_file(tmp_path / "x.pt", data))
    assert len(re.sub(r"\s+", " ", str(caught.value))) < 1000


@pytest.mark.parametrize("factory", [list, dict, int, float, str, tuple, bool, set, OrderedDict, None])
def test_a_defaultdict_of_plain_things_is_read_as_a_dict(tmp_path: Path, factory: Any) -> None:
    counts = defaultdict(factory, {"a": [1, 2], 3: "b"})
    torch.save({"w": torch.ones(2, 2), "seen": counts, "none": defaultdict(factory)}, tmp_path / "x.pt")
    assert verify(tmp_path / "x.pt").ok
    migrate(tmp_path / "x.pt", tmp_path / "y.pt")
    again = torch.load(tmp_path / "y.pt", weights_only=True)
    assert (again["seen"], type(again["seen"]), again["none"]) == ({"a": [1, 2], 3: "b"}, dict, {})


@pytest.mark.parametrize("call", [b"cbuiltins\nlist\n(cbuiltins\nrange\n(J\x00\x00\x00\x10tRtR.", b"cbuiltins\nlist\n)\x81."])
def test_a_class_that_may_be_a_factory_may_not_be_called(call: bytes) -> None:
    with pytest.raises(UnsafeCheckpointError, match=r"builtins\.list"):
        safe_pickle.load(b"\x80\x02" + call, "x")


def test_a_defaultdict_that_makes_what_nobody_knows_is_unsafe() -> None:
    with pytest.raises(UnsafeCheckpointError, match=r"os\.getcwd|posix\.getcwd"):
        safe_pickle.load(pickle.dumps(defaultdict(os.getcwd)), "x")

"""Hostile pickles: nothing in a checkpoint is ever run, whatever it says."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from labkit.checkpoint import open_checkpoint, verify
from labkit.checkpoint.errors import CheckpointFormatError, UnsafeCheckpointError
from labkit.checkpoint.pickles import safe_pickle
from labkit.checkpoint.pickles.pickle_rebuilders import REBUILDERS
from labkit.checkpoint.pickles.pickle_records import Record


class Attack:
    """Pickles as a call of a function with arguments."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def touch(path: Path) -> Attack:
    return Attack(exec, f"open({str(path)!r}, 'w').close()")


def test_a_hostile_metadata_file_runs_code_in_torch_and_is_refused_here(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    ran = tmp_path / "ran"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(touch(ran)))
    with pytest.raises(UnsafeCheckpointError, match=r"builtins\.exec.*Nothing was run") as caught:
        open_checkpoint(tmp_path)
    assert ".metadata" in str(caught.value)
    assert caught.value.names == ("builtins.exec",)
    assert not ran.exists()
    # The trap itself: when this fails, torch reads .metadata with a restricted unpickler now.
    with pytest.raises(BaseException):  # noqa: B017, PT011
        dcp.load({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert ran.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_torch_save_file_is_refused_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    ran = tmp_path / "ran"
    torch.save({"a": torch.ones(2), "b": touch(ran)}, tmp_path / "x.pt", pickle_protocol=max(protocol, 2))
    with pytest.raises(UnsafeCheckpointError, match=r"x\.pt.*builtins\.exec"):
        open_checkpoint(tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt", unknown="opaque")
    assert checkpoint.opaque == ("builtins.exec",)
    assert list(checkpoint.tensors) == ["a"]
    assert not ran.exists()


def test_a_method_of_a_known_class_is_refused_in_every_protocol(tmp_path: Path) -> None:
    for protocol in range(2, 6):
        kept, file = tmp_path / "kept", tmp_path / f"{protocol}.pt"
        kept.touch()
        torch.save({"a": torch.ones(2), "b": Attack(Path.unlink, kept)}, file, pickle_protocol=protocol)
        with pytest.raises(UnsafeCheckpointError, match=r"asks for pathlib(\._local)?\.Path\.unlink"):
            open_checkpoint(file)
        assert [finding.code for finding in verify(file).findings] == ["unsafe"]
        assert kept.exists()
        torch.load(file, weights_only=False)
        assert not kept.exists()


def test_a_hostile_value_inside_a_dcp_shard_is_refused_when_it_is_read(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    dcp.save({"a": touch(ran)}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = open_checkpoint(tmp_path)
    from labkit.checkpoint import Reader

    with Reader(checkpoint) as reader, pytest.raises(UnsafeCheckpointError, match=r"__0_0\.distcp"):
        reader.value("a")
    assert not ran.exists()


def assemble(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def name(module: str, attribute: str) -> bytes:
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


CRAFTED = {
    "attributes of a class": assemble(name("torch.distributed.checkpoint.metadata", "Metadata"), b"N}\x8c\x01xK\x01s\x86b"),
    "attributes of a function": assemble(name("torch._utils", "_rebuild_tensor_v2"), b"N}\x8c\x0c__defaults__)s\x86b"),
    "attributes of OrderedDict": assemble(name("collections", "OrderedDict"), b"N}\x8c\x01xK\x01s\x86b"),
    "a dotted name": assemble(b"\x8c\x05torch\x8c\x0bos.environ.x\x93"),
    "a huge memo index": assemble(b"K\x01r" + struct.pack("<I", 0xFFFFFFF0)),
    "a huge string": assemble(b"\x8d" + struct.pack("<Q", 1 << 60)),
    "a huge bytearray": assemble(b"\x96" + struct.pack("<Q", 1 << 50)),
    "a bytearray of a huge length": assemble(name("builtins", "bytearray"), b"J\xff\xff\xff\x7f\x85R"),
    "a set of a number": assemble(name("builtins", "set"), b"K\x01\x85R"),
    "a persistent id": assemble(b"K\x01Q"),
    "an extension code": assemble(b"\x82\x01"),
    "a tensor without a storage": assemble(name("torch._utils", "_rebuild_tensor_v2"), b"(K\x01K\x00))\x89}tR"),
    "a rebuild by a stranger": assemble(name("torch._tensor", "_rebuild_from_type_v2"), b"(", name("os", "system"), b"NN)tR"),
    "an attribute of a function": assemble(
        name("builtins", "getattr"), name("collections", "OrderedDict"), b"\x8c\x08__init__\x86R"
    ),
    "an empty file": b"",
    "the end in the middle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05to",
}


@pytest.mark.parametrize("data", CRAFTED.values(), ids=CRAFTED.keys())
def test_a_crafted_pickle_raises_a_named_error_and_changes_nothing(data: bytes) -> None:
    before = dict(Record.__dict__), dict(REBUILDERS)
    with pytest.raises((CheckpointFormatError, UnsafeCheckpointError), match=r"hostile\.pkl"):
        safe_pickle.load(data, "hostile.pkl", storages=True)
    assert (dict(Record.__dict__), dict(REBUILDERS)) == before


def test_a_state_that_contains_itself_ends_with_a_named_error(tmp_path: Path) -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    torch.save(loop, tmp_path / "loop.pt")
    with pytest.raises(CheckpointFormatError, match=r"loop\.pt.*contains itself"):
        open_checkpoint(tmp_path / "loop.pt")


def rewritten(source: bytes, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(source)) as old, zipfile.ZipFile(target, "w", compression) as new:
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info)))
    return target.getvalue()


@pytest.mark.parametrize(
    ("change", "compression", "words"),
    [
        (lambda _, data: data, zipfile.ZIP_DEFLATED, "compressed"),
        (lambda name, data: b"big" if name.endswith("byteorder") else data, zipfile.ZIP_STORED, "big-endian"),
        (lambda name, data: data[:8] if name.endswith("data/0") else data, zipfile.ZIP_STORED, "past the end"),
    ],
)
def test_an_archive_that_torch_would_not_write_is_refused(
    tmp_path: Path, change: Callable[[str, bytes], bytes], compression: int, words: str
) -> None:
    file = io.BytesIO()
    torch.save({"a": torch.ones(4)}, file)
    (tmp_path / "x.pt").write_bytes(rewritten(file.getvalue(), change, compression))
    with pytest.raises(CheckpointFormatError, match=words):
        open_checkpoint(tmp_path / "x.pt")


def test_metadata_that_points_outside_the_directory_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../../../etc"))
    with pytest.raises(CheckpointFormatError, match="outside the checkpoint's directory"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_in_an_index_give_a_named_error_or_the_same_reading(tmp_path: Path, seed: int) -> None:
    dcp.save({"a": torch.ones(8), "b": {"c": torch.zeros(2, 2), "n": 3}}, checkpoint_id=tmp_path, no_dist=True)
    data = bytearray((tmp_path / ".metadata").read_bytes())
    generator = torch.Generator().manual_seed(seed)
    for _ in range(150):
        at = int(torch.randint(len(data), (1,), generator=generator))
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        (tmp_path / ".metadata").write_bytes(damaged)
        with contextlib.suppress(CheckpointFormatError):
            open_checkpoint(tmp_path)


def test_a_checkpoint_of_a_python_that_keeps_its_paths_elsewhere_is_read(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    index = (tmp_path / ".metadata").read_bytes()
    here = type(tmp_path).__module__.encode()
    assert here in index
    for module in (b"pathlib", b"pathlib._local"):
        # The name is a short text with its length in front, inside a frame whose length is left out.
        frames = index.replace(b"\x8c" + bytes([len(here)]) + here, b"\x8c" + bytes([len(module)]) + module)
        (tmp_path / ".metadata").write_bytes(_without_frames(frames))
        assert list(open_checkpoint(tmp_path).tensors) == ["weight"]


def _without_frames(data: bytes) -> bytes:
    """A pickle without the lengths of its frames, which no longer fit; pickle reads it all the same."""
    at = data.index(b"\x95")
    return data[:at] + data[at + 9 :]

"""Files that the safetensors library refuses are refused, and so are files that two readers could read differently."""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

from labkit.checkpoint import Reader, load, migrate, open_checkpoint, reshard, verify
from labkit.checkpoint.errors import CheckpointFormatError, CorruptCheckpointError, IncompleteCheckpointError
from labkit.checkpoint.formats.safetensors_format import DTYPES
from labkit.checkpoint.index import manifest
from labkit.checkpoint.index.manifest import FileSum, Manifest

Header = dict[str, Any] | bytes


def f32(start: int, end: int, **other: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]} | other


def written(path: Path, header: Header, data_bytes: int = 16) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data_bytes))
    return path


def one(shape: str, name: bytes = b"a") -> bytes:
    return b'{"%s":{"dtype":"F32","shape":%s,"data_offsets":[0,16]}}' % (name, shape.encode())


REFUSED: dict[str, tuple[Header, int]] = {
    "a hole between two tensors": ({"a": f32(0, 8), "b": f32(12, 16)}, 16),
    "a hole before the first": ({"a": f32(8, 16)}, 16),
    "bytes behind the last": ({"a": f32(0, 16)}, 20),
    "a cut file": ({"a": f32(0, 16)}, 12),
    "two tensors that overlap": ({"a": f32(0, 16), "b": f32(8, 16)}, 16),
    "two tensors in one place": ({"a": f32(0, 16), "b": f32(0, 16)}, 16),
    "an end before its beginning": ({"a": f32(0, 16, data_offsets=[16, 0])}, 16),
    "a name twice": (one("[4]")[:-1] + b"," + one("[4]")[1:].replace(b"[0,16]", b"[16,32]"), 32),
    "a field twice": (one('[4],"shape":[4]'), 16),
    "a shape of floats": (one("[4.0]"), 16),
    "a shape with an exponent": (one("[4e0]"), 16),
    "a shape of texts": (one('["4"]'), 16),
    "a shape of truths": (one("[true]"), 4),
    "a shape of NaN": (one("[NaN]"), 16),
    "a negative shape": (one("[-2,-2]"), 16),
    "a number beyond 64 bits": (one("[4,18446744073709551617]"), 16),
    "a shape that does not fit its bytes": (one("[5]"), 16),
    "UTF-16": (json.dumps({"a": f32(0, 16)}).encode("utf-16-le"), 16),
    "UTF-16 with its mark": (json.dumps({"a": f32(0, 16)}).encode("utf-16"), 16),
    "UTF-8 with a mark": (b"\xef\xbb\xbf" + one("[4]"), 16),
    "no UTF-8": (one("[4]", b"\xff"), 16),
    "half of a surrogate pair": (one("[4]", b"\\ud800"), 16),
    "text behind the header": (one("[4]") + b"{}", 16),
    "zeros behind the header": (one("[4]") + b"\0\0", 16),
    "a dtype that nobody knows": ({"a": f32(0, 16, dtype="F99")}, 16),
    "metadata with a number": ({"__metadata__": {"n": 1}, "a": f32(0, 16)}, 16),
    "metadata in a list": ({"__metadata__": ["n"], "a": f32(0, 16)}, 16),
    "a missing field": ({"a": {"dtype": "F32", "shape": [4]}}, 16),
    "three offsets": ({"a": f32(0, 16, data_offsets=[0, 8, 16])}, 16),
    "a list for a header": (b"[1]", 0),
    "no header": (b"", 0),
    "deep nesting": (b'{"a":' * 50_000, 0),
    "a header that is too large": (b"{}" + b" " * 100_000_000, 0),
}


@pytest.mark.parametrize(("header", "data_bytes"), REFUSED.values(), ids=REFUSED.keys())
def test_s10_what_the_library_refuses_is_refused_by_name(tmp_path: Path, header: Header, data_bytes: int) -> None:
    path = written(tmp_path / "x.safetensors", header, data_bytes)
    with pytest.raises(SafetensorError), safe_open(path, framework="np"):
        pass
    with pytest.raises(CheckpointFormatError, match=r"x\.safetensors: "):
        open_checkpoint(path)
    assert [finding.code for finding in verify(path).findings] == ["unreadable"]


AMBIGUOUS: dict[str, tuple[Header, int]] = {
    "a name twice in one place": (one("[4]")[:-1] + b"," + one("[4]")[1:], 16),
    "a name twice in the metadata": (b'{"__metadata__":{"n":"1","n":"2"},' + one("[4]")[1:], 16),
    "a name twice in what is ignored": (one('[4],"more":{"n":1,"n":2}'), 16),
    "no metadata for metadata": (b'{"__metadata__":null,' + one("[4]")[1:], 16),
    "lists for objects": (b'{"a":["F32",[4],[0,16]]}', 16),
    "a size beyond torch's numbers": ({"a": f32(0, 0, shape=[0, 1 << 63])}, 0),
    "strides beyond torch's numbers": ({"a": f32(0, 0, shape=[0, 1 << 40, 1 << 40])}, 0),
    "more dims than a tensor has": ({"a": f32(0, 0, shape=[0] + [1 << 62] * 10_000)}, 0),
}


@pytest.mark.parametrize(("header", "data_bytes"), AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_s10_what_only_the_library_takes_is_refused_too(tmp_path: Path, header: Header, data_bytes: int) -> None:
    path = written(tmp_path / "x.safetensors", header, data_bytes)
    with safe_open(path, framework="np"):
        pass
    with pytest.raises(CheckpointFormatError, match=r"x\.safetensors: "):
        open_checkpoint(path)


def test_s10_tensors_in_any_order_of_the_header_are_read_from_their_place(tmp_path: Path) -> None:
    path = written(tmp_path / "x.safetensors", {"b": f32(8, 16), "a": f32(0, 8), "": f32(16, 16)}, 0)
    with path.open("ab") as file:
        file.write(struct.pack("<4f", 1, 2, 3, 4))
    with Reader(open_checkpoint(path)) as reader:
        assert reader.tensor("a").tolist() == [1, 2]
        assert reader.tensor("b").tolist() == [3, 4]


@pytest.mark.parametrize("code", DTYPES)
def test_s10_each_dtype_that_labkit_writes_is_known_to_the_library(tmp_path: Path, code: str) -> None:
    size = DTYPES[code].itemsize
    path = written(tmp_path / "x.safetensors", {"a": {"dtype": code, "shape": [1], "data_offsets": [0, size]}}, size)
    assert open_checkpoint(path).tensors["a"].dtype == DTYPES[code]


def test_s10_a_cut_file_is_told_from_one_that_is_no_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(100)}, path)
    whole = path.read_bytes()
    for length in (0, 7, 20, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(IncompleteCheckpointError):
            open_checkpoint(path)


def test_s10_dcps_own_sharded_safetensors_are_read_and_wrong_places_are_refused(tmp_path: Path) -> None:
    save({"w": torch.arange(6.0)}, storage_writer=HuggingFaceStorageWriter(str(tmp_path), save_distributed=True), no_dist=True)
    (shard,) = tmp_path.glob("*.safetensors")
    with Reader(open_checkpoint(tmp_path)) as reader:
        assert reader.tensor("w").tolist() == [0, 1, 2, 3, 4, 5]
    for place in ([-1], [0, 0], [1.0], [1 << 63], [(1 << 63) - 2], "0", None):
        sharding = json.dumps({"w": {"saved_offsets": place}})
        written(shard, {"__metadata__": {"DCP_SHARDING_INFO": sharding}, "w": f32(0, 24)}, 24)
        with pytest.raises(CheckpointFormatError, match="DCP_SHARDING_INFO"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}',
        '{"weight_map":{"a":"x.safetensors"}}'.encode("utf-16"),
        b'{"weight_map":{"a":"x.safetensors"},"metadata":NaN}',
        b'{"weight_map":{"a":"\\u0000"}}',
        b'{"weight_map":{"a":"\\ud800"}}',
        b'{"weight_map":{"a":"."}}',
        b'{"weight_map":{"a":""}}',
        b'{"weight_map":{"a":7}}',
        b'{"weight_map":["a"]}',
        b"[" * 100_000,
    ],
)
def test_s10_an_index_that_can_be_read_in_two_ways_or_names_no_file_is_refused(tmp_path: Path, text: bytes) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(CheckpointFormatError, match=r"index\.json"):
        open_checkpoint(tmp_path)


def special(path: Path, kind: str) -> None:
    """Put something other than a regular file in the place of one."""
    path.unlink(missing_ok=True)
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a socket":
        listener = socket.socket(socket.AF_UNIX)
        os.chdir(path.parent)  # the path of a socket is short
        listener.bind(path.name)
        listener.close()
    elif kind == "a character device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a character device", "a directory"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "x.safetensors", "model.safetensors.index.json", "manifest.json"])
def test_s9_what_is_no_regular_file_is_refused_at_once_with_what_it_is(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "safetensors" in name:
        save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map":{"a":"x.safetensors"}}')
    else:
        save({"a": torch.ones(1)}, checkpoint_id=tmp_path, no_dist=True)
    special(tmp_path / name, kind)
    assert f"{name}: it is {kind}" in " ".join(finding.line() for finding in verify(tmp_path).findings)
    if kind != "a directory":
        with pytest.raises(CheckpointFormatError, match=f"it is {kind}"):
            open_checkpoint(tmp_path / name)


def test_s9_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "blobs/1f3a")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/model.safetensors").symlink_to("../blobs/1f3a")
    assert verify(tmp_path / "snapshot").ok


def test_s9_a_manifest_that_lists_what_is_outside_its_directory_is_corrupt(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("nobody else's business")
    folder = tmp_path / "c"
    for name in (str(secret), "../secret", "a/../../secret", "sub/file", "", ".", "..", "manifest.json", "\0", "\ud800"):
        folder.mkdir(exist_ok=True)
        save({"a": torch.ones(1)}, checkpoint_id=folder, no_dist=True)
        manifest.publish(folder, Manifest({name: FileSum(1, "0")}))
        with pytest.raises(CorruptCheckpointError, match="which is not a file of this directory"):
            manifest.read(folder)
        assert [finding.code for finding in verify(folder).findings] == ["bad-manifest"]


@pytest.mark.parametrize(
    "change",
    [
        {"files": None},
        {"files": {"a": None}},
        {"files": {"a": {"size": "1", "hash": "0"}}},
        {"files": {"a": {"size": -1, "hash": "0"}}},
        {"files": {"a": {"size": 1, "hash": None}}},
        {"files": {"a": {"size": 1, "hash": "0", "more": 1}}},
        {"step": "x"},
        {"step": -1},
        {"world_size": None},
        {"about": []},
    ],
)
def test_s9_a_manifest_of_another_form_with_a_fitting_hash_is_corrupt(tmp_path: Path, change: dict[str, Any]) -> None:
    body = {"format": manifest.FORMAT, "version": 1, "step": 1, "world_size": 1, "about": {}, "files": {}} | change
    body["self"] = manifest.hash_bytes(manifest._canonical(body))
    (tmp_path / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json: it has another form"):
        manifest.read(tmp_path)


def test_s9_only_the_name_that_a_step_is_written_under_is_a_step(tmp_path: Path) -> None:
    for name in ("step_000000001", "step_١٢٣٤٥٦٧٨", "step_00000001\n", "step_1"):
        assert manifest.step_of(tmp_path / name) is None
    assert [manifest.step_of(manifest.step_directory(tmp_path, step)) for step in (1, 10**8)] == [1, 10**8]


def test_a_key_that_the_index_does_not_name_is_told_by_all_that_read_the_folder(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"weight": torch.ones(2, 2), "extra": torch.zeros(2)}, tmp_path / "hf" / "model-00001-of-00001.safetensors")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": "model-00001-of-00001.safetensors"}})
    )
    note = "extra is in model-00001-of-00001.safetensors but not in the index model.safetensors.index.json"
    state = {"weight": torch.zeros(2, 2), "extra": torch.ones(2)}
    for told in (
        open_checkpoint(tmp_path / "hf").notes,
        migrate(tmp_path / "hf", tmp_path / "new").notes,
        reshard(tmp_path / "hf", tmp_path / "two", 2).notes,
        load(tmp_path / "hf", state).notes,
    ):
        assert list(told).count(note) == 1
    assert state["weight"].equal(torch.ones(2, 2))

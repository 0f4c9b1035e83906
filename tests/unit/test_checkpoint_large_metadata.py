"""The fast way of reading a large index gives what the slow way gives, or steps aside."""

from __future__ import annotations

import pickle
import pickletools
import struct
from contextlib import closing
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from labkit.checkpoint import Checkpoint, open_checkpoint
from labkit.checkpoint.errors import CheckpointFormatError, UnsafeCheckpointError
from labkit.checkpoint.formats.large_index import readers, reading
from labkit.checkpoint.formats.large_index.names import Names
from tests.benchmarks.checkpoint_index import small_index, write_index


def both_ways(folder: Path) -> tuple[Checkpoint, Checkpoint]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "LARGE_BYTES", 1 << 60)
        slow = open_checkpoint(folder)
        patch.setattr(reading, "LARGE_BYTES", 0)
        # Small blocks, so that runs of records go on from one to the next.
        patch.setattr(readers, "BLOCK_BYTES", 1 << 13)
        return slow, open_checkpoint(folder)


def assert_same(slow: Checkpoint, fast: Checkpoint) -> None:
    assert list(slow.tensors) == list(fast.tensors)
    assert {key: (v.file, v.start, v.length) for key, v in slow.values.items()} == {
        key: (v.file, v.start, v.length) for key, v in fast.values.items()
    }
    assert slow.files == fast.files
    for key, entry in slow.tensors.items():
        other = fast.tensors[key]
        assert (entry.shape, entry.dtype, entry.path, entry.section) == (other.shape, other.dtype, other.path, other.section)
        for name in ("offsets", "sizes", "starts", "lengths"):
            assert np.array_equal(getattr(entry.chunks, name), getattr(other.chunks, name)), (key, name)
        files = [[table.files[i] for i in table.file_ids.tolist()] for table in (entry.chunks, other.chunks)]
        assert files[0] == files[1]


def read_fast(folder: Path) -> reading.Columns | None:
    with (folder / ".metadata").open("rb") as file:
        return reading.read_large(file, (folder / ".metadata").stat().st_size)


def write(folder: Path, metadata: Metadata) -> bytes:
    data = pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(data)
    return data


@pytest.mark.parametrize(("num_tensors", "num_ranks"), [(1, 2), (3, 1005), (40, 70), (1, 3000)])
def test_the_synthetic_index_is_torchs_own_and_reads_the_same_both_ways(tmp_path: Path, num_tensors: int, num_ranks: int) -> None:
    write_index(tmp_path, num_tensors, num_ranks)
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    expected = small_index(num_tensors, num_ranks)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert found.planner_data == expected.planner_data
    if num_tensors * num_ranks > 2:
        assert read_fast(tmp_path) is not None
    assert_same(*both_ways(tmp_path))


# A tensor's size fits 64 bits, and so does that of its chunks, of 37 rows.
SHAPES = st.lists(st.sampled_from([1, 3, 250, 70_000, 2**33]), max_size=5).filter(lambda shape: 37 * prod(shape) < 2**62)


@st.composite
def metadata(draw: st.DrawFn) -> Metadata:
    """Metadata with any dims, numbers of any width, shared and separate sizes, names and files, and values among them."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {}
    shared_sizes = draw(st.booleans())
    names = draw(st.sampled_from(["the tensor's", "one for its places", "one for each place"]))
    files = [f"__{rank}_0.distcp" for rank in range(3)] if draw(st.booleans()) else None
    for number in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(["w", "layer.weight", "a.long.name.of.a.parameter.weight", "ünïcode.weight"])) + str(number)
        shape = torch.Size(draw(SHAPES))
        pieces = draw(st.sampled_from([1, 2, 3, 999, 1001, 1300])) if shape else 1
        own_name = name if names == "the tensor's" else "".join(list(name))
        described = TensorStorageMetadata(TensorProperties(dtype=draw(st.sampled_from([torch.float32, torch.bfloat16]))), shape, [])
        tensors[name] = described
        for piece in range(pieces):
            offset = torch.Size([piece * 37, *[0] * (len(shape) - 1)] if shape else [])
            size = torch.Size([37, *shape[1:]] if shape else [])
            described.chunks.append(ChunkStorageMetadata(offset, size))
            key = MetadataIndex(
                "".join(list(name)) if names == "one for each place" else own_name,
                offset if shared_sizes else torch.Size(offset),
                piece,
            )
            file = files[piece % 3] if files else f"__{piece % 3}_0.distcp"
            places[key] = _StorageInfo(file, piece * 2**31, 70_000 if piece % 2 else 5)
        if draw(st.booleans()):
            tensors[f"value{number}"] = BytesStorageMetadata()
            places[MetadataIndex(f"value{number}")] = _StorageInfo("__0_0.distcp", 3, 4)
    return Metadata(tensors, {key: ("model", key) for key in tensors}, places)


@settings(max_examples=30)
@given(made=metadata())
def test_any_metadata_reads_the_same_both_ways(tmp_path_factory: pytest.TempPathFactory, made: Metadata) -> None:
    folder = tmp_path_factory.mktemp("metadata")
    write(folder, made)
    assert_same(*both_ways(folder))


@pytest.mark.parametrize("seed", range(2))
def test_a_damaged_large_index_gives_an_error_or_the_reading_of_the_slow_way(tmp_path: Path, seed: int) -> None:
    data = write(tmp_path, small_index(3, 40))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(60):
        damaged = bytearray(data)
        damaged[int(torch.randint(len(data), (1,), generator=generator))] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        (tmp_path / ".metadata").write_bytes(damaged)
        try:
            slow, fast = both_ways(tmp_path)
        except CheckpointFormatError:
            continue
        assert_same(slow, fast)


def test_a_hostile_large_index_is_refused(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> object:
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    made = small_index(2, 30)
    made.planner_data["x"] = Attack()
    write(tmp_path, made)
    with pytest.raises(UnsafeCheckpointError, match=r"builtins\.exec"):
        both_ways(tmp_path)
    assert read_fast(tmp_path).opaque == ("builtins.exec",)  # type: ignore[union-attr]
    assert not (tmp_path / "ran").exists()


def test_a_place_that_refers_to_a_later_text_is_not_read_the_fast_way(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path, small_index(3, 40)))
    numbers: dict[str, int] = {}
    memoized, last, later = 0, "", 0
    for opcode, argument, at in pickletools.genops(bytes(data)):
        if opcode.name == "MEMOIZE":
            numbers.setdefault(last, memoized)
            memoized += 1
        last = argument if opcode.name == "SHORT_BINUNICODE" else ""
        if opcode.name == "LONG_BINGET" and argument == numbers.get("__7_0.distcp"):
            later = later or at
    assert later
    struct.pack_into("<I", data, later + 1, numbers["__8_0.distcp"])
    (tmp_path / ".metadata").write_bytes(data)
    assert read_fast(tmp_path) is None
    with pytest.raises(CheckpointFormatError, match=r"\.metadata"):
        open_checkpoint(tmp_path)


def test_records_inside_a_value_are_no_chunks(tmp_path: Path) -> None:
    made = small_index(3, 40)
    data = write(tmp_path, made)
    made.planner_data["x"] = data[len(data) // 2 : len(data) // 2 + 400]
    write(tmp_path, made)
    assert read_fast(tmp_path) is None
    assert_same(*both_ways(tmp_path))


def test_a_list_of_chunks_that_a_block_cuts_after_a_record_is_not_taken_for_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path, small_index(20, 40))
    end = data.index(b"model.layers.5.attention.wq.weight")
    for _ in range(20):
        end = data.index(b"ub", end) + 2
    monkeypatch.setattr(readers, "BLOCK_BYTES", end - 11)  # what comes before is two bytes and the header of the frame
    with (tmp_path / ".metadata").open("rb") as file, closing(readers.Here(file.fileno())) as reader:
        (part,) = reader.read()
    first, second, *_ = ([span.part.count for span in block.spans] for block in part.blocks)
    assert first[-2:] == [40, 20]
    assert second[:4] == [20, 40, 40, 40]


def test_texts_in_any_order_get_their_numbers_by_first_occurrence() -> None:
    generator = np.random.default_rng(0)
    rows = np.zeros((5000, 24), np.uint8)
    texts = [f"layer.{number:04}".encode() for number in generator.integers(0, 300, len(rows))]
    rows[:, 3:13] = np.frombuffer(b"".join(texts), np.uint8).reshape(-1, 10)
    rows[:, 13:] = generator.integers(0, 256, (len(rows), 11))
    names = Names()
    # In order of first occurrence, then in any order, then with others of another length between.
    found = [names.numbers(rows[begin : begin + 1000], 3, 10) for begin in range(0, 5000, 1000)]
    short = names.numbers(rows[:10], 3, 5)
    assert [names.texts[number] for number in np.concatenate(found)] == texts
    assert names.texts[: len(set(texts))] == list(dict.fromkeys(texts))
    assert [names.texts[number] for number in short] == [b"layer"] * 10

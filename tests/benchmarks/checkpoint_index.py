"""Write the ``.metadata`` of a very large DCP checkpoint without making its ten million objects.

The bytes are what :func:`pickle.dump` gives for the same :class:`torch.distributed.checkpoint.metadata.Metadata`, frames
and memo numbers included, in the order in which DCP puts them together: per tensor all ranks' chunks, then per rank all
tensors' places, with each rank's own copy of the names. A unit test compares a small one with torch's own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

ROWS, COLUMNS = 4, 8
ITEM_BYTES = 1300
BATCH = 1000


def name_of(tensor: int) -> str:
    """The name of a tensor."""
    return f"model.layers.{tensor}.attention.wq.weight"


def small_index(num_tensors: int, num_ranks: int) -> Metadata:
    """The same index as objects."""
    tensors = {
        name_of(t): TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([num_ranks * ROWS, COLUMNS]), [])
        for t in range(num_tensors)
    }
    places = {}
    for r in range(num_ranks):
        file = f"__{r}_0.distcp"
        for t in range(num_tensors):
            name, offset = "".join(name_of(t)), (r * ROWS, 0)
            tensors[name].chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size([ROWS, COLUMNS])))
            key = MetadataIndex("".join(list(name)), torch.Size(offset), r)
            places[key] = _StorageInfo(file, t * ITEM_BYTES, ITEM_BYTES)
    paths = {name: ("model", name[6:]) for name in tensors}
    return Metadata(tensors, paths, places, StorageMeta(), "1.0.0")


class _Memo:
    """Memo numbers, as the pickler hands them out."""

    def __init__(self) -> None:
        self.count = 0

    def put(self, number: int = 1) -> int:
        self.count += number
        return self.count - number


def _text(text: str) -> bytes:
    data = text.encode()
    return b"\x8c" + bytes([len(data)]) + data + b"\x94"


def _get(number: int) -> bytes:
    return b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)


def _int(value: int) -> bytes:
    if value < 256:
        return b"K" + bytes([value])
    return b"M" + struct.pack("<H", value) if value < 65536 else b"J" + struct.pack("<i", value)


def _pair(a: int, b: int) -> bytes:
    return _int(a) + _int(b) + b"\x86\x94\x85\x94R\x94"


class _Frames:
    """Groups opcodes into frames of about 64 KiB."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._file.write(b"\x80\x04")
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size >= 65536:
            self.flush()

    def flush(self) -> None:
        self._file.write(b"\x95" + struct.pack("<Q", self._size))
        self._file.writelines(self._parts)
        self._parts, self._size = [], 0

    def close(self) -> int:
        self.flush()
        size = self._file.tell()
        self._file.close()
        return size


def _global(module: str | bytes, name: str, memo: _Memo) -> tuple[bytes, int]:
    """A class by its module (text, or a get of it) and name; the bytes and the class's memo number."""
    head = _text(module) if isinstance(module, str) else module
    memo.put(2 if isinstance(module, str) else 1)
    return head + _text(name) + b"\x93\x94", memo.put()


def write_index(folder: Path, num_tensors: int, num_ranks: int) -> int:
    """Write ``folder/.metadata``; returns its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    memo, frames = _Memo(), _Frames(folder / ".metadata")
    metadata = "torch.distributed.checkpoint.metadata"
    head, _ = _global(metadata, "Metadata", memo)  # the module's text has number 0
    frames.add(head + b")\x81\x94}\x94(" + _text("state_dict_metadata") + b"}\x94(")
    memo.put(4)
    names = _tensors(frames, memo, num_tensors, num_ranks)
    frames.add(b"u" + _text("planner_data") + b"}\x94(")
    memo.put(2)
    _planner_data(frames, memo, names)
    frames.add(b"u" + _text("storage_data") + b"}\x94(")
    memo.put(2)
    _storage(frames, memo, num_tensors, num_ranks)
    frames.add(b"u" + _text("storage_meta") + b"N" + _text("version") + _text("1.0.0") + b"ub.")
    return frames.close()


def _tensors(frames: _Frames, memo: _Memo, num_tensors: int, num_ranks: int) -> list[int]:
    names: list[int] = []
    first: dict[str, int] = {}
    for t in range(num_tensors):
        names.append(memo.count)
        frames.add(_text(name_of(t)))
        memo.put()
        frames.add(_tensor_head(memo, first, num_ranks))
        for index, record in enumerate(_chunks(memo, first, num_ranks)):
            if index % BATCH == 0:
                frames.add(b"(" if index == 0 else b"e(")
            frames.add(record)
        frames.add(b"eub")
        if (t + 1) % BATCH == 0 and t + 1 < num_tensors:
            frames.add(b"u(")
    return names


def _tensor_head(memo: _Memo, first: dict[str, int], num_ranks: int) -> bytes:
    module = _get(0)
    if "tensor" not in first:
        cls, first["tensor"] = _global(module, "TensorStorageMetadata", memo)
        out = cls + b")\x81\x94}\x94(" + _text("properties")
        memo.put(2)
        first["properties"] = memo.put()
        cls, first["props"] = _global(module, "TensorProperties", memo)
        out += cls + b")\x81\x94("
        memo.put()
        text = memo.count
        cls, first["bfloat16"] = _global("torch", "bfloat16", memo)
        first["torch"] = text
        out += cls
        cls, first["layout"] = _global("torch.serialization", "_get_layout", memo)
        out += cls + _text("torch.strided") + b"\x85\x94R\x94\x89"
        memo.put(2)
        first["strided"] = memo.put()
        cls, first["encoding"] = _global(module, "_MEM_FORMAT_ENCODING", memo)
        out += cls + b"K\x00\x85\x94R\x94\x89t\x94b"
        memo.put(1)
        first["contiguous"] = memo.put()
        memo.put()
        out += _text("size")
        first["size"] = memo.put()
        cls, first["Size"] = _global(_get(first["torch"]), "Size", memo)
        out += cls + _pair(num_ranks * ROWS, COLUMNS) + _text("chunks") + b"]\x94"
        memo.put(3)
        first["chunks"] = memo.put()
        memo.put()
        return out
    out = _get(first["tensor"]) + b")\x81\x94}\x94(" + _get(first["properties"]) + _get(first["props"]) + b")\x81\x94("
    out += _get(first["bfloat16"]) + _get(first["strided"]) + b"\x89" + _get(first["contiguous"]) + b"\x89t\x94b"
    out += _get(first["size"]) + _get(first["Size"]) + _pair(num_ranks * ROWS, COLUMNS) + _get(first["chunks"]) + b"]\x94"
    memo.put(2 + 1 + 1 + 3 + 1)
    return out


def _chunks(memo: _Memo, first: dict[str, int], num_ranks: int) -> Iterator[bytes]:
    start = 0
    if "chunk" not in first:
        cls, first["chunk"] = _global(_get(0), "ChunkStorageMetadata", memo)
        memo.put(2)
        first["offsets"] = memo.put()
        memo.put(3)
        first["sizes"] = memo.put()
        memo.put(3)
        size = _get(first["Size"])
        head = cls + b")\x81\x94}\x94(" + _text("offsets") + size + _pair(0, 0)
        yield head + _text("sizes") + size + _pair(ROWS, COLUMNS) + b"ub"
        start = 1
    head = _get(first["chunk"]) + b")\x81\x94}\x94(" + _get(first["offsets"]) + _get(first["Size"])
    tail = _get(first["sizes"]) + _get(first["Size"]) + _pair(ROWS, COLUMNS) + b"ub"
    memo.put(8 * (num_ranks - start))
    for r in range(start, num_ranks):
        yield head + _pair(r * ROWS, 0) + tail


def _planner_data(frames: _Frames, memo: _Memo, names: list[int]) -> None:
    model = b""
    for t, number in enumerate(names):
        frames.add(_get(number) + (model or _text("model")) + _text(name_of(t)[6:]) + b"\x86\x94")
        if not model:
            model = _get(memo.put())
        memo.put(2)
        if (t + 1) % BATCH == 0 and t + 1 < len(names):
            frames.add(b"u(")


def _storage(frames: _Frames, memo: _Memo, num_tensors: int, num_ranks: int) -> None:
    texts = [_text(name_of(t)) for t in range(num_tensors)]
    starts = [_int(t * ITEM_BYTES) for t in range(num_tensors)]
    length, count, ids = _int(ITEM_BYTES), 0, {}
    for r in range(num_ranks):
        at = _pair(r * ROWS, 0)
        file = b""
        for t in range(num_tensors):
            if not ids:
                cls, ids["index"] = _global(_get(0), "MetadataIndex", memo)
                frames.add(cls + b")\x81\x94}\x94(" + _text("fqn") + texts[t] + _text("index") + _int(r))
                memo.put(2)
                ids["fqn"] = memo.put()
                memo.put()
                ids["number"] = memo.put()
                ids["offset"] = memo.put()
                memo.put(3)
                frames.add(_text("offset") + _get(SIZE_CLASS) + at + b"ub")
                cls, ids["info"] = _global("torch.distributed.checkpoint.filesystem", "_StorageInfo", memo)
                frames.add(cls + b")\x81\x94}\x94(" + _text("relative_path") + _text(f"__{r}_0.distcp"))
                memo.put(2)
                ids["path"] = memo.put()
                file = _get(memo.put())
                frames.add(_get(ids["offset"]) + starts[t] + _text("length") + length + b"ub")
                ids["length"] = memo.put()
            else:
                if t <= 1:
                    key = _get(ids["index"]) + b")\x81\x94}\x94(" + _get(ids["fqn"])
                    mid = _get(ids["number"]) + _int(r) + _get(ids["offset"]) + _get(SIZE_CLASS) + at + b"ub"
                    mid += _get(ids["info"]) + b")\x81\x94}\x94(" + _get(ids["path"])
                    tail = _get(ids["length"]) + length + b"ub"
                    offset = _get(ids["offset"])
                # Key: object, dict, name, the size's three. Place: object, dict, and the file's name the first time.
                memo.put(8)
                if not file:
                    frames.add(key + texts[t] + mid + _text(f"__{r}_0.distcp") + offset + starts[t] + tail)
                    # The name is the last that this record puts.
                    file = _get(memo.put())
                else:
                    frames.add(key + texts[t] + mid + file + offset + starts[t] + tail)
            count += 1
            if count % BATCH == 0 and count < num_tensors * num_ranks:
                frames.add(b"u(")


SIZE_CLASS = 32  # torch.Size's number, fixed by what the first tensor defines before it; checked against a real pickle

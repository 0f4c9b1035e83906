"""Writing of a torch.save archive whose tensors are read one at a time.

:func:`torch.save` needs the whole state in memory. But the archive is a zip of stored records, so it can be written record by
record: first the pickle, which describes each tensor and names its storage, then the storages. The pickle calls the same functions
as torch's own, so ``torch.load(weights_only=True)`` reads it.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod
from pathlib import Path, PurePath
from typing import Any

import torch

from labkit.checkpoint.contents.contents import OutValue
from labkit.checkpoint.data.hashed_file import HashedFile
from labkit.checkpoint.data.read import Reader
from labkit.checkpoint.index.manifest import FileSum
from labkit.checkpoint.pickles.pickle_records import STORAGES
from labkit.checkpoint.write.out_files import OutFile, Piece, Reserve, Ties, Written
from labkit.checkpoint.write.zip_writer import StoredZip

_ALIGN = 64  # torch aligns storages to this, for mmap=True
_STORAGE_NAMES = {dtype: name for name, dtype in STORAGES.items() if dtype is not None}


@dataclass(frozen=True, eq=False)
class _Storage:
    """A storage that is written later in the archive."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor whose data fill a whole storage, in C order."""

    storage: _Storage
    shape: tuple[int, ...]


class _Pickler(pickle.Pickler):
    """A pickler for nested states in which each tensor is a :class:`_Tensor`."""

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, _Storage):
            return None
        if item.dtype in _STORAGE_NAMES:
            return ("storage", getattr(torch, _STORAGE_NAMES[item.dtype]), item.key, "cpu", item.numel)
        return ("storage", torch.UntypedStorage, item.key, "cpu", item.numel * item.dtype.itemsize)

    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, _Tensor):
            return NotImplemented
        strides, step = [], 1
        for size in reversed(item.shape):
            strides.append(step)
            step *= max(size, 1)
        arguments: tuple[Any, ...] = (item.storage, 0, item.shape, tuple(reversed(strides)), False, OrderedDict())
        if item.storage.dtype in _STORAGE_NAMES:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, item.storage.dtype)


def write_state(
    out: HashedFile,
    name: str,
    pieces: Sequence[Piece],
    values: Sequence[OutValue],
    plain: Mapping[str, Any],
    reader: Reader,
    reserve: Callable[[int], AbstractContextManager[None]],
    progress: Callable[[int], None],
) -> None:
    """Write a whole state as one archive. Tensors with equal sources share one storage, so ties are kept."""
    storages: dict[str, tuple[_Storage, Piece]] = {}
    leaves: dict[tuple[str | int, ...], Any] = {}
    for piece in pieces:
        known, _ = storages.setdefault(piece.tensor.source.label, (_storage(piece, len(storages)), piece))
        leaves[piece.tensor.path] = _Tensor(known, piece.tensor.source.shape)
    leaves |= {value.path: plain[value.key] for value in values}
    stem = PurePath(name).stem.encode(errors="replace").decode() or "archive"  # any name works
    _write(out, stem, _pickled(nested(leaves)), list(storages.values()), reader, reserve, progress)


def write_tensor(out: HashedFile, piece: Piece, reader: Reader, reserve: Callable[[int], AbstractContextManager[None]]) -> None:
    """Write one piece as a separate archive, as DCP stores it."""
    data = _lone_pickle(piece.tensor.source.dtype, piece.box[1])
    _write(out, "archive", data, [(_storage(piece, 0), piece)], reader, reserve, lambda _: None)


@lru_cache
def _lone_pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of a tensor that is alone in its archive; cached, because a checkpoint has many tensors but few shapes."""
    return _pickled(_Tensor(_Storage("0", dtype, prod(shape)), shape))


def _pickled(state: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(state)
    return buffer.getvalue()


def _storage(piece: Piece, number: int) -> _Storage:
    return _Storage(str(number), piece.tensor.source.dtype, prod(piece.box[1]))


def _write(
    out: HashedFile,
    stem: str,
    data: bytes,
    storages: Sequence[tuple[_Storage, Piece]],
    reader: Reader,
    reserve: Callable[[int], AbstractContextManager[None]],
    progress: Callable[[int], None],
) -> None:
    archive = StoredZip(out, _ALIGN)
    archive.add(f"{stem}/data.pkl", data)
    archive.add(f"{stem}/byteorder", b"little")
    for storage, piece in storages:
        archive.add_stream(f"{stem}/data/{storage.key}", piece.size_bytes, partial(piece.write, out, reader, reserve))
        progress(piece.size_bytes)
    archive.add(f"{stem}/version", b"3\n")
    archive.close()


def nested(leaves: Mapping[tuple[str | int, ...], Any]) -> Any:
    """Build nested dicts and lists from leaves by path.

    An int is a position in a list, and an :class:`IntKey` is a key of a dict. Digits directly below an optimizer's ``state`` are
    parameter numbers, even if DCP turned them into text: given text, ``load_state_dict`` would silently restore nothing.
    """
    root: Any = [] if any(type(path[0]) is int for path in leaves) else {}
    for path, value in leaves.items():
        here: Any = root
        for index, step in enumerate(path):
            numbered = index > 0 and path[index - 1] == "state" and str(step).isdigit()
            key = int(step) if numbered or isinstance(step, int) else step
            last = index == len(path) - 1
            follower: Any = None if last else _container(path, index + 1)
            if isinstance(here, list):
                here.extend([None] * (int(key) + 1 - len(here)))
                if last or here[int(key)] is None:
                    here[int(key)] = value if last else follower
                here = here[int(key)]
            elif last:
                here[key] = value
            else:
                here = here.setdefault(key, follower)
    return root


def _container(path: tuple[str | int, ...], index: int) -> Any:
    return [] if type(path[index]) is int and path[index - 1] != "state" else {}


@dataclass
class TorchWriter:
    """One torch.save file with the whole nested state."""

    files: list[OutFile]
    single: str | None
    plain: Mapping[str, Any] = field(default_factory=dict)
    tied: Ties = field(default_factory=dict)
    """Always empty: pieces with the same source share one storage."""

    def write(self, file: OutFile, path: Path, reader: Reader, reserve: Reserve, progress: Callable[[int], None]) -> Written:
        with HashedFile(path) as out:
            write_state(out, path.name, file.pieces, file.values, self.plain, reader, reserve, progress)
        return Written(out.total())

    def finish(self, folder: Path, done: Mapping[str, Written]) -> dict[str, FileSum]:
        return {}

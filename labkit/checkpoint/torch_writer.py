"""Write a torch.save archive whose tensors are read one at a time.

:func:`torch.save` wants the whole state in memory. The archive is a zip of stored records, so it can be written record by
record: the pickle first, with each tensor described and its storage named, then the storages. The pickle asks for the same
functions as torch's own, and ``torch.load(weights_only=True)`` reads it.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePath
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from labkit.checkpoint.dcp_writer import HashedFile
from labkit.checkpoint.read import Reader, bits
from labkit.checkpoint.safe_pickle import STORAGES

if TYPE_CHECKING:
    from labkit.checkpoint.contents import OutValue
    from labkit.checkpoint.writers import Piece

_ALIGN = 64
_STORAGE_NAMES = {dtype: name for name, dtype in STORAGES.items() if dtype is not None}


@dataclass(frozen=True, eq=False)
class _Storage:
    """A storage that comes later in the archive."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor whose data are a whole storage, in C order."""

    storage: _Storage
    shape: tuple[int, ...]


class _Pickler(pickle.Pickler):
    """Pickles a nested state in which tensors are :class:`_Tensor`."""

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


def write_torch_archive(
    out: HashedFile,
    name: str,
    pieces: Sequence[Piece],
    values: Sequence[OutValue],
    plain: Mapping[str, Any],
    reader: Reader,
    reserve: Callable[[int], AbstractContextManager[None]],
    progress: Callable[[int], None],
) -> None:
    """Write a whole state. Tensors with equal sources share one storage, so ties survive."""
    storages: dict[str, tuple[_Storage, Piece]] = {}
    leaves: dict[tuple[str | int, ...], Any] = {}
    for piece in pieces:
        source = piece.tensor.source
        storage = _Storage(str(len(storages)), source.dtype, piece.size_bytes // source.dtype.itemsize)
        known, _ = storages.setdefault(source.label, (storage, piece))
        leaves[piece.tensor.path] = _Tensor(known, source.shape)
    leaves |= {value.path: plain[value.key] for value in values}
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(nested(leaves))
    stem = PurePath(name.removesuffix(".tmp")).stem or "archive"
    with zipfile.ZipFile(cast(IO[bytes], out), "w", zipfile.ZIP_STORED) as archive:
        _record(archive, out, f"{stem}/data.pkl", buffer.getvalue())
        _record(archive, out, f"{stem}/byteorder", b"little")
        for storage, piece in storages.values():
            with reserve(piece.cost):
                data = bits(piece.read(reader))
                _record(archive, out, f"{stem}/data/{storage.key}", data.numpy().data if data.numel() else b"")
                del data
            progress(piece.size_bytes)
        _record(archive, out, f"{stem}/version", b"3\n")


def _record(archive: zipfile.ZipFile, out: HashedFile, name: str, data: Any) -> None:
    """Append a record whose data begin at a multiple of 64 bytes, as torch aligns them for ``mmap=True``."""
    info = zipfile.ZipInfo(name)
    size = len(data)
    large = size > 0x7FFFFFFF
    header = 30 + len(name.encode()) + (20 if large else 0)
    padding = -(out.tell() + header + 4) % _ALIGN
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    info.file_size = size
    with archive.open(info, "w", force_zip64=large) as record:
        step = 1 << 24
        for at in range(0, size, step):
            record.write(data[at : at + step])


def nested(leaves: Mapping[tuple[str | int, ...], Any]) -> Any:
    """Nested dicts and lists from leaves by path.

    Integers are list positions, except right below an optimizer's ``state``, where they are parameter numbers. Digits there
    that DCP turned into text become numbers again: ``load_state_dict`` takes text without a word and restores nothing.
    """
    root: dict[Any, Any] = {}
    for path, value in leaves.items():
        here: Any = root
        for index, step in enumerate(path):
            numbered = index > 0 and path[index - 1] == "state" and str(step).isdigit()
            key = int(step) if numbered else step
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
    return [] if isinstance(path[index], int) and path[index - 1] != "state" else {}

"""Reading of DCP directories (torch.distributed.checkpoint): ``.metadata`` and the files that it refers to.

``.metadata`` is a pickle of :class:`torch.distributed.checkpoint.metadata.Metadata`. torch reads it with plain
``pickle.load``; this module uses :mod:`labkit.checkpoint.pickles.safe_pickle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from labkit.base.progress import task
from labkit.checkpoint.errors import CheckpointFormatError, IncompleteCheckpointError, UnsafeCheckpointError
from labkit.checkpoint.files.mistaken_files import refuse_mistaken
from labkit.checkpoint.files.plain_files import is_inside, read_regular, regular_size
from labkit.checkpoint.formats.dcp_versions import METADATA_MODULE, note_form
from labkit.checkpoint.index.layout import is_shape
from labkit.checkpoint.index.model import Checkpoint, ChunkTable, Int64s, Path_, TensorEntry, ValueEntry, writer_rank
from labkit.checkpoint.pickles import safe_pickle
from labkit.checkpoint.pickles.pickle_records import Record
from labkit.checkpoint.pickles.safe_pickle import Unknown

METADATA_FILE = ".metadata"


def read_dcp(root: Path, *, unknown: Unknown = "refuse") -> Checkpoint:
    """Read a DCP directory's index.

    Raises:
        IncompleteCheckpointError: ``.metadata`` is missing (an unfinished save) or lacks an entry's bytes.
        CheckpointFormatError: ``.metadata`` is not DCP metadata.
        UnsafeCheckpointError: It names something outside the allow-list.
    """
    path = root / METADATA_FILE
    try:
        data = read_regular(path)
    except FileNotFoundError:
        raise IncompleteCheckpointError(
            root, "it has no .metadata: the save into it did not finish, or .metadata was not copied along"
        ) from None
    if not data.startswith(b"\x80"):
        refuse_mistaken(path)
    with task("read the index", len(data)) as reading:
        metadata, opaque = safe_pickle.load(data, path, unknown=unknown)
        reading.advance(len(data))
        if not isinstance(metadata, Record) or "state_dict_metadata" not in metadata.state:
            raise UnsafeCheckpointError(path, opaque) if opaque else CheckpointFormatError(path, "it holds no DCP metadata")
        checkpoint = Checkpoint(path=root, root=root, kind="dcp", opaque=opaque)
        checkpoint.metadata = {"dcp_version": _version(metadata.state), "metadata_bytes": len(data)}
        return _guarded(path, opaque, lambda: _fill(checkpoint, metadata.state, path))


def _guarded(path: Path, opaque: tuple[str, ...], work: Callable[[], Checkpoint]) -> Checkpoint:
    try:
        return work()
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        if opaque:
            raise UnsafeCheckpointError(path, opaque) from None
        raise CheckpointFormatError(path, f"its metadata has an unexpected form ({type(error).__name__}: {error})") from None


def _note_files(checkpoint: Checkpoint, files: list[str], path: Path) -> None:
    for name in sorted(files, key=lambda name: (writer_rank(name) or 0, name)):
        checkpoint.files[name] = regular_size(checkpoint.root / name)
    checkpoint.files[METADATA_FILE] = path.stat().st_size


def _fill(checkpoint: Checkpoint, state: Mapping[str, Any], path: Path) -> Checkpoint:
    note_form(checkpoint, state)
    storage, files = _storage_index(state.get("storage_data") or {}, path)
    paths = state.get("planner_data") or {}
    transforms: set[str] = set()
    _check_size(state["state_dict_metadata"].values(), checkpoint.metadata["metadata_bytes"], path)
    for key, described in state["state_dict_metadata"].items():
        if not isinstance(key, str):
            raise TypeError(f"an entry with {key!r} for a name")
        if described.name == f"{METADATA_MODULE}.BytesStorageMetadata":
            info = storage.get((key, None))
            if info is None:
                raise IncompleteCheckpointError(path, f"it declares {key!r} and does not say where its bytes are")
            file, start, length = info
            checkpoint.values[key] = ValueEntry(key, _path(paths, key), files[file], start, length)
        else:
            checkpoint.tensors[key] = _tensor_entry(key, described.state, storage, files, _path(paths, key), path)
    for (info,) in (state.get("storage_data") or {}).values():
        transforms.update(info.get("transform_descriptors") or ())
    if transforms:
        checkpoint.metadata["transforms"] = sorted(map(str, transforms))
    _note_files(checkpoint, files, path)
    return checkpoint


def _check_size(described: Iterable[Any], num_bytes: int, path: Path) -> None:
    # In a pickle, entries may share a list of chunks, and chunks a size, so a small file can describe huge tables.
    tensors = [entry.state for entry in described if "size" in entry.state]
    numbers = sum((1 + len(state["size"])) * len(state.get("chunks") or ()) for state in tensors)
    if numbers > 16 * num_bytes:
        raise CheckpointFormatError(path, f"its {num_bytes:,} bytes describe {numbers:,} chunks and dims, by repeating their parts")


def _version(state: Mapping[str, Any]) -> str | None:
    found = state.get("version")
    return found if isinstance(found, str) else None  # torch 2.0 wrote no version


def _path(paths: Mapping[str, Any], key: str) -> Path_:
    found = paths.get(key) if isinstance(paths, dict) else None
    if isinstance(found, tuple) and found and all(isinstance(part, str | int) for part in found):
        return found
    return (key,)


def _storage_index(
    storage_data: Mapping[Any, Any], path: Path
) -> tuple[dict[tuple[str, tuple[int, ...] | None], tuple[int, int, int]], list[str]]:
    index: dict[tuple[str, tuple[int, ...] | None], tuple[int, int, int]] = {}
    files: dict[str, int] = {}
    for (at,), (stored,) in storage_data.items():
        name = stored["relative_path"]
        file = files.get(name)
        if file is None:
            file = files[_inside(name, path)] = len(files)
        start, length = stored["offset"], stored["length"]
        if type(start) is not int or type(length) is not int or start < 0 or length < 0 or start + length >= 1 << 63:
            raise ValueError(f"bytes from {start!r}, {length!r} of them")
        index[at["fqn"], at.get("offset")] = (file, start, length)
    return index, list(files)


def _inside(name: Any, path: Path) -> str:
    if not is_inside(name, nested=True):
        raise CheckpointFormatError(path, f"it points at {name!r}, outside the checkpoint's directory")
    return str(name)


def _tensor_entry(
    key: str,
    described: Mapping[str, Any],
    storage: Mapping[tuple[str, tuple[int, ...] | None], tuple[int, int, int]],
    files: list[str],
    nested: Path_,
    path: Path,
) -> TensorEntry:
    shape = _shape(described["size"])
    chunks = described["chunks"]
    offsets = [chunk["offsets"] for (chunk,) in chunks]
    sizes = [chunk["sizes"] for (chunk,) in chunks]
    try:
        # A tensor saved whole may have no offset in its index (torch 2.0) or an explicit zero one.
        places = [storage.get((key, offset)) or storage[key, None] for offset in offsets]
    except KeyError:
        raise IncompleteCheckpointError(path, f"it declares a chunk of {key!r} and does not say where its bytes are") from None
    count, dims = len(chunks), len(shape)
    columns = np.array(places, dtype=np.int64).reshape(count, 3)
    table = ChunkTable(
        *_boxes(np.array(offsets).reshape(count, dims), np.array(sizes).reshape(count, dims)),
        columns[:, 0],
        columns[:, 1],
        columns[:, 2],
        files,
        archive=True,
    )
    return TensorEntry(key, nested, shape, _dtype(described["properties"], key, path), table)


def _shape(size: Any) -> tuple[int, ...]:
    shape = tuple(size)
    if not is_shape(shape):
        raise ValueError(f"a tensor of the shape {shape!r}")
    return shape


def _boxes(offsets: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> tuple[Int64s, Int64s]:
    """Check and return the offsets and sizes of chunks. The dtype was left to numpy: as int64 it would accept strings."""
    for numbers in (offsets, sizes):
        # Below 2**62, so that the end of a chunk also fits into 64 bits.
        if numbers.size and (numbers.dtype != np.int64 or numbers.min() < 0 or numbers.max() >= 1 << 62):
            raise ValueError("a chunk's place is not made of integers, or is beyond all tensors")
    if sizes.prod(axis=1, dtype=np.float64).max(initial=0) >= 1 << 62:
        raise ValueError("a chunk is larger than all tensors")
    return offsets.astype(np.int64, copy=False), sizes.astype(np.int64, copy=False)


def _dtype(properties: Record, key: str, path: Path) -> torch.dtype:
    state = properties.state
    # TensorProperties pickles itself as a tuple; plain dicts, which other programs write, are accepted too.
    dtype = state["state"][0] if "state" in state else state.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise CheckpointFormatError(path, f"it gives no dtype for {key!r}")
    return dtype

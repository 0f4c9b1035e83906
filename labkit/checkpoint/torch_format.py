"""Read torch.save files: one full state, disjoint shards, or one file per rank (FSDP1 SHARDED and LOCAL, DTensor)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from labkit.checkpoint import safe_pickle
from labkit.checkpoint.archive import RecordRange, TorchArchive
from labkit.checkpoint.errors import CheckpointFormatError, IncompleteCheckpointError
from labkit.checkpoint.layout import ShardDim, is_contiguous, local_box, span
from labkit.checkpoint.model import Checkpoint, Chunk, ChunkTable, Path_, TensorEntry, ValueEntry, tie, writer_rank
from labkit.checkpoint.names import FLAT_PARAMETER
from labkit.checkpoint.plain_files import is_inside, open_regular, parse_json, read_regular
from labkit.checkpoint.safe_pickle import Record, TensorRef, Unknown
from labkit.checkpoint.wording import counted

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".distcp.pt")
INDEX_FILE = "pytorch_model.bin.index.json"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(slots=True)
class _Found:
    """One leaf of one file: a tensor's chunks, with whether they are a part (a shard) or the whole."""

    path: Path_
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk]
    sharded: bool
    storages: frozenset[str]


@dataclass(slots=True)
class _File:
    name: str
    rank: int
    tensors: dict[str, _Found] = field(default_factory=dict)
    values: dict[str, tuple[Path_, Any]] = field(default_factory=dict)
    opaque: tuple[str, ...] = ()
    records: list[tuple[int, int, int]] = field(default_factory=list)


def torch_files(root: Path) -> list[Path]:
    """The torch.save files of a directory, those with a rank in their name in rank order."""
    files = [file for file in root.iterdir() if file.is_file() and file.suffix in SUFFIXES and file.name[0] != "."]
    return sorted(files, key=lambda file: (writer_rank(file.name) if writer_rank(file.name) is not None else -1, file.name))


def read_torch(path: Path, *, unknown: Unknown = "refuse") -> Checkpoint:
    """Read a torch.save file, or a directory of them, without building a tensor.

    Raises:
        IncompleteCheckpointError: A file is cut off, or one that the index names is missing.
        CheckpointFormatError: A file is no torch.save archive, or is in the format from before torch 1.6.
        UnsafeCheckpointError: A file names something outside the allow-list.
    """
    root = path if path.is_dir() else path.parent
    paths = _indexed(root) if path.is_dir() else [path]
    files = [_read_file(file, index, unknown) for index, file in enumerate(paths)]
    repeated = len(files) > 1 and _overlap(files)
    checkpoint = Checkpoint(path=path, root=root, kind="torch_ranks" if repeated else "torch")
    checkpoint.files = {file.name: file.stat().st_size for file in paths}
    checkpoint.opaque = tuple(sorted({name for file in files for name in file.opaque}))
    checkpoint.metadata = {"ranks": len(files)} if repeated else {}
    checkpoint.records = {file.name: file.records for file in files}
    for file in files:
        _drop_flat_views(file, checkpoint.notes)
    for key in dict.fromkeys(key for file in files for key in file.tensors):
        checkpoint.tensors[key] = _merge(key, [file for file in files if key in file.tensors], root)
    for key in dict.fromkeys(key for file in files for key in file.values):
        checkpoint.values[key] = _value(key, [file for file in files if key in file.values])
    tie(checkpoint.tensors.values())
    return checkpoint


def _indexed(root: Path) -> list[Path]:
    index = root / INDEX_FILE
    if not index.exists():
        return torch_files(root)
    try:
        names = sorted(set(parse_json(read_regular(index))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointFormatError(index, "it has no readable weight_map") from None
    for name in names:
        if not is_inside(name):
            raise CheckpointFormatError(index, f"it points at {name!r}, outside its own directory")
        if not (root / name).exists():
            raise IncompleteCheckpointError(root / name, "the index names this file, and it is missing")
    return [root / name for name in names]


def _overlap(files: Sequence[_File]) -> bool:
    seen: set[str] = set()
    for file in files:
        keys = file.tensors.keys() | file.values.keys()
        if seen & keys:
            return True
        seen |= keys
    return any(found.sharded for file in files for found in file.tensors.values())


def _read_file(path: Path, index: int, unknown: Unknown) -> _File:
    named = writer_rank(path.name)
    result = _File(path.name, index if named is None else named)
    with open_regular(path) as file:
        magic = file.read(16) or b""
        if magic.startswith(_LEGACY):
            raise CheckpointFormatError(
                path,
                "it is in torch's format from before 1.6. Convert it: torch.save(torch.load(file, weights_only=True), new_file).",
            )
        if not magic:
            raise IncompleteCheckpointError(path, "it is empty")
        if magic.startswith(b"\x80"):
            raise CheckpointFormatError(
                path,
                "it is a plain pickle, no torch.save archive. Where you trust it, load it with pickle and save it with torch.save.",
            )
        archive = TorchArchive(file, path, 0, path.stat().st_size)
        state, result.opaque = archive.load(unknown)
        if isinstance(state, Record) and not isinstance(state.state.get("_local_tensor"), TensorRef):
            state = {"": state}
        places = _Places(archive, path)
        for found_at, leaf in safe_pickle.walk(state, path):
            nested = found_at or ("value",)  # a file that holds one tensor or value and no dict
            key = ".".join(map(str, nested))
            if key in result.tensors or key in result.values:
                raise CheckpointFormatError(path, f"two different entries flatten to the name {key!r}")
            found = _tensor(nested, leaf, places)
            if found is None:
                result.values[key] = (nested, leaf)
            else:
                result.tensors[key] = found
        result.records = places.records()
    return result


class _Places:
    """Byte ranges of the storages of one archive, each looked up once."""

    def __init__(self, archive: TorchArchive, path: Path) -> None:
        self._archive, self.path = archive, path
        self._known: dict[str, RecordRange] = {}

    def records(self) -> list[tuple[int, int, int]]:
        """The storages in use, as (start, length, CRC-32), by start."""
        return sorted((where.start, where.length, where.crc) for where in self._known.values())

    def chunk(self, ref: TensorRef, offsets: Sequence[int]) -> Chunk:
        """The chunk of a tensor that lies at ``offsets`` of the whole."""
        where = self._known.get(ref.storage.key)
        if where is None:
            where = self._known[ref.storage.key] = self._archive.storage(ref.storage.key)
        plain = is_contiguous(ref.shape, ref.strides)
        reach = prod(ref.shape) if plain else span(ref.shape, ref.strides)
        start, length = ref.offset * ref.dtype.itemsize, reach * ref.dtype.itemsize
        if length and start + length > where.length:
            raise CheckpointFormatError(self.path, f"a tensor reaches past the end of its storage {ref.storage.key!r}")
        strides = None if plain else ref.strides
        return Chunk(tuple(offsets), ref.shape, self.path.name, where.start + start, length, strides=strides)


def _tensor(nested: Path_, leaf: Any, places: _Places) -> _Found | None:
    if isinstance(leaf, TensorRef):
        chunk = places.chunk(leaf, (0,) * len(leaf.shape))
        return _Found(nested, leaf.shape, leaf.dtype, [chunk], False, frozenset({leaf.storage.key}))
    if not isinstance(leaf, Record):
        return None
    try:
        if leaf.name.endswith("sharded_tensor.api.ShardedTensor"):
            return _sharded_tensor(nested, leaf, places)
        if isinstance(leaf.state.get("_local_tensor"), TensorRef):
            return _dtensor(nested, leaf, places)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointFormatError(places.path, f"{'.'.join(map(str, nested))}: its shards cannot be read ({error})") from None
    return None


def _sharded_tensor(nested: Path_, leaf: Record, places: _Places) -> _Found:
    shards, metadata = leaf.state["state"][:2]
    shape = tuple(metadata.state["size"])
    refs = [(shard.state["tensor"], shard.state["metadata"].state["shard_offsets"]) for shard in shards]
    dtype = refs[0][0].dtype if refs else leaf.args[0]
    chunks = [places.chunk(ref, offsets) for ref, offsets in refs]
    return _Found(nested, shape, dtype, chunks, True, frozenset(ref.storage.key for ref, _ in refs))


def _dtensor(nested: Path_, leaf: Record, places: _Places) -> _Found:
    ref: TensorRef = leaf.state["_local_tensor"]
    spec = leaf.state["_spec"].state
    shape = tuple(leaf.args[1])
    mesh = spec["mesh"].state
    placements = [_placement(placement, places.path) for placement in spec["placements"]]
    coordinate = mesh.get("_coordinate_on_dim")
    if coordinate is None:
        raise ValueError("the rank that wrote it was outside the mesh")
    offsets, sizes = local_box(shape, _mesh_shape(mesh), tuple(coordinate), placements)
    if sizes != ref.shape and 0 not in sizes:
        raise ValueError(f"its local shape {ref.shape} is not {sizes}, which its placements give")
    chunks = [places.chunk(ref, offsets)] if 0 not in ref.shape or not any(shape) else []
    return _Found(nested, shape, ref.dtype, chunks, True, frozenset({ref.storage.key}))


def _placement(record: Record, path: Path) -> ShardDim | None:
    kind = record.name.rpartition(".")[2]
    if kind == "Replicate":
        return None
    if kind in ("Shard", "_StridedShard"):
        return ShardDim(int(record.state["dim"]), strided=kind == "_StridedShard")
    raise CheckpointFormatError(path, f"a DTensor with the placement {kind}, which is no state to save (call redistribute first)")


def _mesh_shape(mesh: Mapping[str, Any]) -> tuple[int, ...]:
    # The form of DeviceMesh's state changed: a tensor of ranks (to 2.8), a layout of shapes (2.9 on), of axes (2.13 on).
    if isinstance(mesh.get("mesh"), TensorRef):
        return mesh["mesh"].shape  # type: ignore[no-any-return]
    layout = mesh["_layout"].state
    if "axes" in layout:
        return tuple(prod(axis.state["shape"]) for axis in layout["axes"])
    shape = layout["shape"]
    return tuple(prod(part) if isinstance(part, tuple) else int(part) for part in (shape if isinstance(shape, tuple) else (shape,)))


def _drop_flat_views(file: _File, notes: list[str]) -> None:
    # LOCAL_STATE_DICT with use_orig_params=True also lists this rank's slices of the flat parameters, as 1-D views
    # without any word on what part of the parameter they are.
    flat = {key: found for key, found in file.tensors.items() if key.split(".")[-1] == FLAT_PARAMETER}
    storages = frozenset().union(*(found.storages for found in flat.values()))
    views = [
        key
        for key, found in file.tensors.items()
        if flat
        and key not in flat
        and not found.sharded
        and len(found.shape) == 1
        and (found.storages & storages or found.shape == (0,))
    ]
    for key in views:
        del file.tensors[key]
    if views:
        notes.append(f"{file.name}: {counted(len(views), 'view')} of its flat parameters left out ({views[0]}, ...)")


def _merge(key: str, files: Sequence[_File], root: Path) -> TensorEntry:
    first = files[0].tensors[key]
    for file in files[1:]:
        found = file.tensors[key]
        if (found.dtype, len(found.shape), found.sharded) != (first.dtype, len(first.shape), first.sharded):
            raise CheckpointFormatError(root / file.name, f"{key!r} has another dtype or number of dims than in {files[0].name}")
    dims = len(first.shape)
    flat = key.rsplit(".", maxsplit=1)[-1] == FLAT_PARAMETER
    if not first.sharded:
        tables = [ChunkTable.of(file.tensors[key].chunks, dims) for file in files]
        return TensorEntry(key, first.path, first.shape, first.dtype, tables[0], replicas=tuple(tables[1:]), flat=flat)
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Chunk]] = {}
    for file in files:
        for chunk in file.tensors[key].chunks:
            boxes.setdefault((chunk.offsets, chunk.sizes), []).append(chunk)
    chunks = ChunkTable.of([copies[0] for copies in boxes.values()], dims)
    copies = [chunk for same in boxes.values() for chunk in same[1:]]
    replicas = (ChunkTable.of(copies, dims),) if copies else ()
    return TensorEntry(key, first.path, first.shape, first.dtype, chunks, replicas=replicas, flat=flat)


def _value(key: str, files: Sequence[_File]) -> ValueEntry:
    path, value = files[0].values[key]
    others = {file.rank: file.values[key][1] for file in files} if len(files) > 1 else {}
    return ValueEntry(key, path, files[0].name, inline=value, replicas=others)

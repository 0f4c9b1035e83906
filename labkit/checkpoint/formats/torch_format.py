"""Reading of torch.save files: one full state, disjoint shards, or one file per rank (FSDP1 SHARDED and LOCAL, DTensor)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from labkit.checkpoint.errors import CheckpointFormatError, IncompleteCheckpointError, UnsupportedTensorError
from labkit.checkpoint.files.plain_files import is_inside, open_regular, parse_json, read_regular
from labkit.checkpoint.formats.archive import RecordRange, TorchArchive, expanded_bytes, refuse_other
from labkit.checkpoint.formats.rank_files import Found, RankFile, missing_ranks, ranks_of
from labkit.checkpoint.index.layout import ShardDim, is_contiguous, local_box, span
from labkit.checkpoint.index.model import Checkpoint, Chunk, ChunkTable, Path_, TensorEntry, ValueEntry, tie
from labkit.checkpoint.index.names import FLAT_PARAMETER
from labkit.checkpoint.pickles.pickle_records import Record, TensorRef, UnsupportedTensor, is_dtensor, is_sharded_tensor
from labkit.checkpoint.pickles.safe_pickle import Unknown, Walk
from labkit.checkpoint.wording import counted


def read_torch(
    path: Path,
    root: Path,
    names: Sequence[str],
    *,
    ranks: Mapping[str, int] | None = None,
    together: bool = False,
    unknown: Unknown = "refuse",
) -> Checkpoint:
    """Read torch.save files as one checkpoint, without building a tensor.

    Args:
        path: The path that the caller gave, for messages.
        root: The directory that the names are relative to.
        names: The files.
        ranks: File name to rank, if the caller gave it.
        together: As for :func:`labkit.checkpoint.formats.rank_files.ranks_of`, which decides how the files belong together.
        unknown: As for :func:`labkit.checkpoint.open_checkpoint`.

    Raises:
        AmbiguousCheckpointError: The files may be one checkpoint or several.
        IncompleteCheckpointError: A file is cut off or missing.
        CheckpointFormatError: A file is not a torch.save archive, or is in the format from before torch 1.6.
        UnsafeCheckpointError: A file names something outside the allow-list.
    """
    files = [_read_file(root, name, unknown) for name in names]
    numbers = ranks_of(files, root, ranks, together=together)
    if numbers is not None:
        files.sort(key=lambda file: numbers[file.name])
    checkpoint = Checkpoint(path=path, root=root, kind="torch" if numbers is None or len(files) == 1 else "torch_ranks")
    checkpoint.files = {file.name: (root / file.name).stat().st_size for file in files}
    checkpoint.opaque = tuple(sorted({name for file in files for name in file.opaque}))
    checkpoint.records = {file.name: file.records for file in files}
    if numbers is not None:
        checkpoint.ranks = {file.name: numbers[file.name] for file in files}
        world_size = max(max(numbers.values()) + 1, *(file.world_size for file in files))
        checkpoint.missing_ranks = missing_ranks(path, numbers.values(), world_size)
        checkpoint.metadata = {"ranks": world_size} if len(files) > 1 else {}
    for file in files:
        _drop_flat_views(file, checkpoint.notes)
    for key in dict.fromkeys(key for file in files for key in file.tensors):
        checkpoint.tensors[key] = _merge(key, [file for file in files if key in file.tensors], checkpoint.conflicts)
        for table in (checkpoint.tensors[key].chunks, *checkpoint.tensors[key].replicas):
            table.writers = checkpoint.ranks
    for key in dict.fromkeys(key for file in files for key in file.values):
        checkpoint.values[key] = _value(key, [file for file in files if key in file.values], checkpoint.ranks)
    if checkpoint.conflicts:
        key, forms = next(iter(checkpoint.conflicts.items()))
        number = counted(len(checkpoint.conflicts), "tensor")
        checkpoint.notes.append(f"other ranks' files hold another form of {number}: {key} is {forms}")
    tie(checkpoint.tensors.values())
    return checkpoint


def indexed_files(index: Path) -> list[str]:
    """Return the names of the files that an index (``weight_map``) lists.

    Raises:
        CheckpointFormatError: It cannot be read, or names a file outside its directory.
        IncompleteCheckpointError: A file is missing.
    """
    try:
        names = sorted(set(parse_json(read_regular(index))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointFormatError(index, "it has no readable weight_map") from None
    for name in names:
        if not is_inside(name):
            raise CheckpointFormatError(index, f"it points at {name!r}, outside its own directory")
        if not (index.parent / name).exists():
            raise IncompleteCheckpointError(index.parent / name, "the index names this file, but it is missing")
    return names


def _read_file(root: Path, name: str, unknown: Unknown) -> RankFile:
    path = root / name
    result = RankFile(name)
    with open_regular(path) as file:
        refuse_other(path, file.read(16) or b"")
        archive = TorchArchive(file, path, 0, path.stat().st_size)
        state, result.opaque = archive.load(unknown)
        places = _Places(archive, path, name)
        for found_at, leaf in Walk(path, archive.index_bytes).leaves(state):
            nested = found_at or ("value",)  # the file holds a single tensor or value, not a dict
            key = ".".join(map(str, nested))
            if key in result.tensors or key in result.values:
                raise CheckpointFormatError(
                    path,
                    f"two different entries flatten to the name {key!r}, which DCP could not tell apart either. Load the file with "
                    "torch, give one of the keys that make it another name without a dot, and save it again.",
                )
            found = _tensor(nested, leaf, places)
            if isinstance(found, Found):
                result.tensors[key] = found
                if found.sharded:
                    _note_writer(result, leaf, path)
            else:
                result.values[key] = (nested, found)
        result.records = places.records()
    return result


def _note_writer(file: RankFile, leaf: Record, path: Path) -> None:
    """Note which rank wrote a sharded tensor, and how many ranks there were, according to the tensor itself."""
    try:
        if is_dtensor(leaf):
            mesh = leaf.state["_spec"].state["mesh"].state
            root = mesh["_root_mesh"].state if isinstance(mesh.get("_root_mesh"), Record) else mesh
            writers, every = [mesh.get("_rank")], list(root.get("_flatten_rank_map") or ())
        else:
            shards, metadata = leaf.state["state"][:2]
            writers = [_placed_on(shard.state["metadata"].state.get("placement")) for shard in shards]
            every = [_placed_on(shard.state.get("placement")) for shard in metadata.state.get("shards_metadata") or ()]
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        raise CheckpointFormatError(path, "a sharded tensor in it does not say in torch's form which rank wrote it") from None
    file.writers.update(rank for rank in writers if isinstance(rank, int))
    file.world_size = max([file.world_size, *(rank + 1 for rank in (*writers, *every) if isinstance(rank, int))])


def _placed_on(placement: Any) -> int | None:
    rank = placement.state.get("_rank") if isinstance(placement, Record) else None
    return rank if isinstance(rank, int) else None


class _Places:
    """Byte ranges of an archive's storages, each looked up only once."""

    def __init__(self, archive: TorchArchive, path: Path, name: str) -> None:
        self._archive, self.path, self._name = archive, path, name
        self._known: dict[str, RecordRange] = {}
        self._views: set[tuple[Any, ...]] = set()
        self._left = expanded_bytes(path.stat().st_size)

    def records(self) -> list[tuple[int, int, int]]:
        """Return the storages in use, as (start, length, CRC-32), by start."""
        return sorted((where.start, where.length, where.crc) for where in self._known.values())

    def chunk(self, ref: TensorRef, offsets: Sequence[int]) -> Chunk:
        """Return the chunk for a tensor that is at ``offsets`` in the whole tensor.

        Raises:
            UnsupportedTensorError: This chunk would make the file's tensors far larger than the file.
        """
        where = self._known[ref.storage.key] = self._archive.tensor(ref, self._known.get(ref.storage.key))
        if ref.view not in self._views:
            if ref.size_bytes > self._left:
                raise UnsupportedTensorError(
                    self.path, f"tensor expanded to {ref.size_bytes:,} bytes, of which {where.length:,} are stored"
                )
            self._views.add(ref.view)
            self._left -= ref.size_bytes
        plain = is_contiguous(ref.shape, ref.strides)
        reach = prod(ref.shape) if plain else span(ref.shape, ref.strides)
        start, length = where.start + ref.offset * ref.dtype.itemsize, reach * ref.dtype.itemsize
        strides = None if plain and not ref.lazy else ref.strides
        return Chunk(tuple(offsets), ref.shape, self._name, start, length, strides=strides, lazy=ref.lazy)


def _tensor(nested: Path_, leaf: Any, places: _Places) -> Any:
    """Return the tensor if a leaf is one, a stand-in if it is an unsupported tensor, else the leaf itself."""
    try:
        if isinstance(leaf, TensorRef):
            chunk = places.chunk(leaf, (0,) * len(leaf.shape))
            return Found(nested, leaf.shape, leaf.dtype, [chunk], False, frozenset({leaf.storage.key}))
        if is_sharded_tensor(leaf):
            return _sharded_tensor(nested, leaf, places)
        return _dtensor(nested, leaf, places) if is_dtensor(leaf) else leaf
    except UnsupportedTensorError as error:
        return UnsupportedTensor(error.what)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        name = ".".join(map(str, nested))
        raise CheckpointFormatError(places.path, f"{name}: its shards cannot be read ({str(error)[:300]})") from None


def _sharded_tensor(nested: Path_, leaf: Record, places: _Places) -> Found:
    shards, metadata = leaf.state["state"][:2]
    shape = tuple(metadata.state["size"])
    refs: list[TensorRef] = [shard.state["tensor"] for shard in shards]
    boxes = [shard.state["metadata"].state for shard in shards]
    dtype = refs[0].dtype if refs else metadata.state["tensor_properties"].state["state"][0]
    for ref, box in zip(refs, boxes, strict=True):
        if ref.dtype != dtype or ref.shape != tuple(box["shard_sizes"]):
            raise ValueError(f"a shard is {ref}, and should be {dtype} of shape {tuple(box['shard_sizes'])}")
    chunks = [places.chunk(ref, box["shard_offsets"]) for ref, box in zip(refs, boxes, strict=True)]
    return Found(nested, shape, dtype, chunks, True, frozenset(ref.storage.key for ref in refs))


def _dtensor(nested: Path_, leaf: Record, places: _Places) -> Found:
    ref: TensorRef = leaf.state["_local_tensor"]
    spec = leaf.state["_spec"].state
    shape = tuple(leaf.args[1])
    mesh = spec["mesh"].state
    mesh_shape = _mesh_shape(mesh)
    placements = [_placement(placement, places.path) for placement in spec["placements"]]
    coordinate = mesh.get("_coordinate_on_dim")
    if coordinate is None:
        raise ValueError("the rank that wrote it was outside the mesh")
    _check_order(spec, placements, mesh_shape)
    offsets, sizes = local_box(shape, mesh_shape, tuple(coordinate), placements)
    if sizes != ref.shape and not (0 in sizes and 0 in ref.shape):
        raise ValueError(f"its local shape {ref.shape} is not {sizes}, which its placements give")
    chunks = [places.chunk(ref, offsets)] if 0 not in ref.shape or not any(shape) else []
    return Found(nested, shape, ref.dtype, chunks, True, frozenset({ref.storage.key}))


def _placement(record: Record, path: Path) -> ShardDim | None:
    kind = record.name.rpartition(".")[2]
    if kind == "Replicate":
        return None
    if kind in ("Shard", "_StridedShard"):
        return ShardDim(int(record.state["dim"]), strided=kind == "_StridedShard")
    raise UnsupportedTensorError(path, f"DTensor with the placement {kind}, which cannot be saved (call redistribute first)")


def _check_order(spec: Mapping[str, Any], placements: Sequence[ShardDim | None], mesh_shape: Sequence[int]) -> None:
    """Raise ValueError if the mesh's axes shard one dim in a different order than :func:`local_box` assumes."""
    for entry in spec.get("shard_order") or ():
        _, axes = entry.args if isinstance(entry, Record) else entry
        if list(axes) != sorted(axes):
            raise ValueError(f"the mesh's axes shard a dim in the order {tuple(axes)}, which labkit does not read")
    for axis, (placement, record) in enumerate(zip(placements, spec["placements"], strict=True)):
        if placement is not None and placement.strided:
            later = [number for number, other in enumerate(placements) if number > axis and other and other.dim == placement.dim]
            if record.state["split_factor"] != prod(mesh_shape[number] for number in later):
                raise ValueError(f"a split factor of {record.state['split_factor']}, which the later axes of its mesh do not give")


def _mesh_shape(mesh: Mapping[str, Any]) -> tuple[int, ...]:
    # DeviceMesh's state has had several forms: a tensor of ranks (up to 2.8), a layout of shapes (from 2.9), one of axes (from
    # 2.13).
    if isinstance(mesh.get("mesh"), TensorRef):
        return mesh["mesh"].shape  # type: ignore[no-any-return]
    layout = mesh["_layout"].state
    if "axes" in layout:
        return tuple(prod(axis.state["shape"]) for axis in layout["axes"])
    shape = layout["shape"]
    return tuple(prod(part) if isinstance(part, tuple) else int(part) for part in (shape if isinstance(shape, tuple) else (shape,)))


def _drop_flat_views(file: RankFile, notes: list[str]) -> None:
    # LOCAL_STATE_DICT with use_orig_params=True also lists this rank's slices of the flat parameters, as 1-D views that do not
    # record their position.
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


def _merge(key: str, files: Sequence[RankFile], conflicts: dict[str, str]) -> TensorEntry:
    first = files[0].tensors[key]
    for file in files[1:]:
        found = file.tensors[key]
        if (found.dtype, len(found.shape), found.sharded) != (first.dtype, len(first.shape), first.sharded):
            conflicts[key] = f"{_described(first)} in {files[0].name}, and {_described(found)} in {file.name}"
            files = files[:1]
            break
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


def _described(found: Found) -> str:
    shape = "x".join(map(str, found.shape)) or "scalar"
    return f"{shape} {str(found.dtype).removeprefix('torch.')}{', sharded' if found.sharded else ''}"


def _value(key: str, files: Sequence[RankFile], ranks: Mapping[str, int]) -> ValueEntry:
    path, value = files[0].values[key]
    others = {ranks[file.name]: file.values[key][1] for file in files} if len(files) > 1 and ranks else {}
    return ValueEntry(key, path, files[0].name, inline=value, replicas=others)

"""Read safetensors: one file, a directory of shards with or without index, and DCP's own sharded files.

The format is an 8-byte little-endian length, a JSON header and the data, C-contiguous and without holes
(https://github.com/huggingface/safetensors#format). Reading the header ourselves gives the byte ranges, which the
``safetensors`` library keeps to itself. ``DCP_SHARDING_INFO`` in the metadata is what
:class:`torch.distributed.checkpoint.HuggingFaceStorageWriter` with ``save_distributed=True`` notes about a shard's place.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from labkit.checkpoint.errors import CheckpointFormatError, IncompleteCheckpointError
from labkit.checkpoint.model import Checkpoint, Chunk, ChunkTable, TensorEntry

INDEX_SUFFIX = ".index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_SHARDING = "DCP_SHARDING_INFO"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and the byte at which the data begin.

    Raises:
        IncompleteCheckpointError: The file ends inside the header.
        CheckpointFormatError: It is no safetensors file.
    """
    with path.open("rb") as file:
        raw = file.read(8)
        if len(raw) < 8:
            raise IncompleteCheckpointError(path, "it is too short for a safetensors file")
        (length,) = struct.unpack("<Q", raw)
        if length > MAX_HEADER_BYTES:
            raise CheckpointFormatError(path, f"its safetensors header claims {length} bytes; it is damaged or no safetensors file")
        text = file.read(length)
    if len(text) < length:
        raise IncompleteCheckpointError(path, "it ends inside its safetensors header")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(path, f"its safetensors header is no JSON ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise CheckpointFormatError(path, "its safetensors header is no JSON object")
    return header, 8 + length


def read_safetensors(path: Path, names: Sequence[str] | None = None, root: Path | None = None) -> Checkpoint:
    """Read a safetensors file, an index file with its files, or the named files of a directory.

    Args:
        path: The file or index; or what was asked for, where ``names`` are given.
        names: The files, relative to ``root``.
        root: Their directory; ``path`` itself by default.

    Raises:
        IncompleteCheckpointError: A file that the index names is missing, or lacks a tensor that the index gives it.
        CheckpointFormatError: A header is wrong, two files hold one tensor, or a file is no safetensors file.
    """
    if names is not None:
        root, index_file, files = root or path, None, list(names)
    elif path.name.endswith(INDEX_SUFFIX):
        root, index_file, files = path.parent, path, sorted(set(_weight_map(path).values()))
    else:
        root, index_file, files = path.parent, None, [path.name]
    checkpoint = Checkpoint(path=path, root=root, kind="safetensors")
    parts: dict[str, list[tuple[Chunk, torch.dtype]]] = {}
    for name in files:
        _read_file(checkpoint, root / name, name, parts)
    for key, found in parts.items():
        checkpoint.tensors[key] = _entry(checkpoint, key, found)
    _add_tied(checkpoint)
    if index_file is not None:
        _check_index(checkpoint, index_file)
    return checkpoint


def _weight_map(index_file: Path) -> dict[str, str]:
    try:
        found = json.loads(index_file.read_text())["weight_map"]
        ok = isinstance(found, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in found.items())
    except (ValueError, KeyError, TypeError, RecursionError):
        ok = False
    if not ok:
        raise CheckpointFormatError(index_file, "it has no readable weight_map")
    outside = [name for name in found.values() if Path(name).name != name]
    if outside:
        raise CheckpointFormatError(index_file, f"it points at {outside[0]!r}, outside its own directory")
    return found  # type: ignore[no-any-return]


def _read_file(checkpoint: Checkpoint, path: Path, name: str, parts: dict[str, list[tuple[Chunk, torch.dtype]]]) -> None:
    try:
        header, base = read_header(path)
        size = path.stat().st_size
    except FileNotFoundError:
        raise IncompleteCheckpointError(path, "the index names this file, and it is missing") from None
    metadata = header.pop("__metadata__", {})
    if isinstance(metadata, dict):
        sharding = _sharding(metadata.pop(_SHARDING, None), path)
        checkpoint.metadata.update({key: str(value) for key, value in metadata.items()})
    checkpoint.files[name] = size
    for key, described in header.items():
        dtype, shape, begin, end = _described(path, key, described)
        if base + end > size:
            raise IncompleteCheckpointError(
                path, f"it has {size} bytes and {key!r} ends at byte {base + end}. The file is cut off."
            )
        offsets = tuple(sharding.get(key, (0,) * len(shape)))
        parts.setdefault(key, []).append((Chunk(offsets, shape, name, base + begin, end - begin), dtype))


def _sharding(text: object, path: Path) -> dict[str, tuple[int, ...]]:
    if not isinstance(text, str):
        return {}
    try:
        return {key: tuple(int(n) for n in place["saved_offsets"]) for key, place in json.loads(text).items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointFormatError(path, f"its {_SHARDING} cannot be read") from None


def _described(path: Path, key: str, described: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    try:
        code, shape = described["dtype"], tuple(int(n) for n in described["shape"])
        begin, end = (int(n) for n in described["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointFormatError(path, f"its header describes {key!r} in a form that safetensors does not have") from None
    if code not in DTYPES:
        raise CheckpointFormatError(path, f"{key!r} has the dtype {code!r}, which this version of labkit does not know")
    dtype = DTYPES[code]
    if begin < 0 or any(n < 0 for n in shape) or end - begin != prod(shape) * dtype.itemsize:
        raise CheckpointFormatError(
            path, f"{key!r} has shape {shape} and dtype {code}, and {end - begin} bytes, which do not agree"
        )
    return dtype, shape, begin, end


def _entry(checkpoint: Checkpoint, key: str, found: list[tuple[Chunk, torch.dtype]]) -> TensorEntry:
    first, dtype = found[0]
    if len({other for _, other in found}) > 1 or len({len(chunk.sizes) for chunk, _ in found}) > 1:
        raise CheckpointFormatError(
            checkpoint.root / found[1][0].file, f"{key!r} has another dtype or number of dims than in {first.file}"
        )
    # A shard does not say how large the whole is: its end is the furthest end of any shard.
    shape = tuple(max(chunk.offsets[d] + chunk.sizes[d] for chunk, _ in found) for d in range(len(first.sizes)))
    unique = {(chunk.offsets, chunk.sizes): chunk for chunk, _ in found}
    if len(unique) < len(found) and not any(any(chunk.offsets) for chunk, _ in found):
        names = " and ".join(chunk.file for chunk, _ in found[:2])
        raise CheckpointFormatError(checkpoint.root, f"{key!r} is in {names}. Remove the file that does not belong here.")
    return TensorEntry(key, (key,), shape, dtype, ChunkTable.of(list(unique.values()), len(shape)))


def _add_tied(checkpoint: Checkpoint) -> None:
    # What safetensors.torch.save_model notes: the name that it left out, and the one that has the data.
    for name, owner in checkpoint.metadata.items():
        entry = checkpoint.tensors.get(owner)
        if entry is not None and name not in checkpoint.tensors and name != "format":
            checkpoint.tensors[name] = replace(entry, key=name, path=(name,), tied_to=owner)


def _check_index(checkpoint: Checkpoint, index_file: Path) -> None:
    weight_map: Mapping[str, str] = _weight_map(index_file)
    checkpoint.files[index_file.name] = index_file.stat().st_size
    for key, name in weight_map.items():
        entry = checkpoint.tensors.get(key)
        if entry is None or name not in entry.chunks.file_names():
            raise IncompleteCheckpointError(index_file, f"it says that {key!r} is in {name}, and it is not")
    for key in {key for key, entry in checkpoint.tensors.items() if entry.tied_to is None} - weight_map.keys():
        checkpoint.notes.append(f"{key} is in {checkpoint.tensors[key].chunks[0].file} and not in the index {index_file.name}")

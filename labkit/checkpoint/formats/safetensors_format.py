"""Reading of safetensors: one file, a directory of shards with or without an index, and DCP's own sharded files.

The format is an 8-byte little-endian length, a JSON header, and the data, C-contiguous without gaps
(https://github.com/huggingface/safetensors#format). Files that the ``safetensors`` library refuses are refused. The header is also
parsed here, because the library does not expose byte ranges. ``DCP_SHARDING_INFO`` in the metadata gives the shard's position; it
is written by :class:`torch.distributed.checkpoint.HuggingFaceStorageWriter` with ``save_distributed=True``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from labkit.checkpoint.errors import CheckpointFormatError, IncompleteCheckpointError
from labkit.checkpoint.files.mistaken_files import refuse_mistaken
from labkit.checkpoint.files.plain_files import is_inside, open_regular, parse_json, read_regular
from labkit.checkpoint.index.layout import is_shape
from labkit.checkpoint.index.model import Checkpoint, Chunk, ChunkTable, TensorEntry

INDEX_SUFFIX = ".index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
# Refused headers up to this size are parsed to explain why; larger ones are not, since the parsed form can be 20 times as large.
_EXPLAINED_BYTES = 1 << 20
_LARGEST = (1 << 63) - 1  # the largest integer of torch and numpy
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
    """Return the JSON header of a safetensors file and the offset of the data.

    The ``safetensors`` library decides whether the file is valid. It reports neither where tensors are nor whether a file was
    merely truncated, so the header is parsed here too. This parser is stricter: it refuses headers that another reader could read
    differently.

    Raises:
        IncompleteCheckpointError: The file ends inside the header, or before the end of its data.
        CheckpointFormatError: It is not a safetensors file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise IncompleteCheckpointError(path, "it is too short for a safetensors file")
        raw = file.read(8)
        (length,) = struct.unpack("<Q", raw)
        if length > MAX_HEADER_BYTES or 8 + length > size:
            refuse_mistaken(path)
        if length > MAX_HEADER_BYTES:
            raise CheckpointFormatError(path, f"its header claims {length} bytes; it is damaged or not a safetensors file")
        if 8 + length > size:
            raise IncompleteCheckpointError(path, "it ends inside its safetensors header")
        refusal = _refusal(path)
        if refusal and length > _EXPLAINED_BYTES:
            raise CheckpointFormatError(path, refusal)
        header = _parse_header(path, file.read(length))
    _check_entries(path, header, size - 8 - length)
    if refusal:
        raise CheckpointFormatError(path, refusal)
    return header, 8 + length


def _refusal(path: Path) -> str:
    """Return why the library refuses a file; an empty string if it does not."""
    try:
        with safe_open(path, framework="np"):
            return ""
    except SafetensorError as error:
        return f"the safetensors library refuses it: {error}"


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = parse_json(text)
    except ValueError as error:
        raise CheckpointFormatError(path, f"its safetensors header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointFormatError(path, "its safetensors header is not a JSON object")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointFormatError(path, "its __metadata__ is not a map of texts to texts")
    return header


def _check_entries(path: Path, header: Mapping[str, Any], data_bytes: int) -> None:
    for key, described in header.items():
        if key != "__metadata__":
            _, _, _, end = _described(path, key, described)
            if end > data_bytes:
                raise IncompleteCheckpointError(
                    path, f"it has {data_bytes} bytes of data, but {key!r} ends at byte {end} of them. The file is cut off."
                )


def read_safetensors(path: Path, names: Sequence[str] | None = None, root: Path | None = None) -> Checkpoint:
    """Read a safetensors file, an index file with its files, or the named files of a directory.

    Args:
        path: The file or index; if ``names`` are given, the path that the caller gave.
        names: The files, relative to ``root``.
        root: Their directory; ``path`` itself by default.

    Raises:
        IncompleteCheckpointError: A file that the index names is missing, or lacks a tensor that the index places in it.
        CheckpointFormatError: A header is wrong, two files hold the same tensor, or a file is not a safetensors file.
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
        found = parse_json(read_regular(index_file))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointFormatError(index_file, f"it has no readable weight_map ({type(error).__name__}: {error})") from None
    if not isinstance(found, dict):
        raise CheckpointFormatError(index_file, "its weight_map is not a map of names to files")
    outside = [name for name in found.values() if not is_inside(name)]
    if outside:
        raise CheckpointFormatError(index_file, f"it points at {outside[0]!r}, outside its own directory")
    return found


def _read_file(checkpoint: Checkpoint, path: Path, name: str, parts: dict[str, list[tuple[Chunk, torch.dtype]]]) -> None:
    try:
        header, base = read_header(path)
        checkpoint.files[name] = path.stat().st_size
    except FileNotFoundError:
        raise IncompleteCheckpointError(path, "the index names this file, but it is missing") from None
    metadata = header.pop("__metadata__", {})
    sharding = _sharding(metadata.pop(_SHARDING, None), path)
    checkpoint.metadata.update(metadata)
    for key, described in header.items():
        dtype, shape, begin, end = _described(path, key, described)
        offsets = sharding.get(key, (0,) * len(shape))
        if len(offsets) != len(shape) or any(o + n > _LARGEST for o, n in zip(offsets, shape, strict=False)):
            raise CheckpointFormatError(path, f"its {_SHARDING} puts {key!r} of shape {shape} at {offsets}")
        parts.setdefault(key, []).append((Chunk(offsets, shape, name, base + begin, end - begin), dtype))


def _sharding(text: str | None, path: Path) -> dict[str, tuple[int, ...]]:
    if text is None:
        return {}
    try:
        found = {key: tuple(place["saved_offsets"]) for key, place in parse_json(text.encode()).items()}
        ok = all(_is_count(number) for offsets in found.values() for number in offsets)
    except (ValueError, KeyError, TypeError, AttributeError):
        ok = False
    if not ok:
        raise CheckpointFormatError(path, f"its {_SHARDING} cannot be read")
    return found


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number <= _LARGEST


def _described(path: Path, key: str, described: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    try:
        code, shape = described["dtype"], tuple(described["shape"])
        begin, end = described["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointFormatError(path, f"its header describes {key!r} in a form that safetensors does not have") from None
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointFormatError(path, f"{key!r} has the dtype {code!r}, which this version of labkit does not know")
    if not is_shape(shape) or not _is_count(begin) or not _is_count(end):
        raise CheckpointFormatError(path, f"{key!r} has a shape or offsets that no tensor of torch can have")
    dtype = DTYPES[code]
    if end - begin != prod(shape) * dtype.itemsize:
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
    # Shards do not record the whole tensor's size, so take the furthest end of any shard.
    shape = tuple(max(chunk.offsets[d] + chunk.sizes[d] for chunk, _ in found) for d in range(len(first.sizes)))
    unique = {(chunk.offsets, chunk.sizes): chunk for chunk, _ in found}
    if len(unique) < len(found) and not any(any(chunk.offsets) for chunk, _ in found):
        names = " and ".join(chunk.file for chunk, _ in found[:2])
        raise CheckpointFormatError(checkpoint.root, f"{key!r} is in {names}. Remove the file that does not belong here.")
    return TensorEntry(key, (key,), shape, dtype, ChunkTable.of(list(unique.values()), len(shape)))


def _add_tied(checkpoint: Checkpoint) -> None:
    # safetensors.torch.save_model writes these pairs: a name that it left out, and the name that holds the data.
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
            raise IncompleteCheckpointError(index_file, f"it says that {key!r} is in {name}, but it is not")
    for key in {key for key, entry in checkpoint.tensors.items() if entry.tied_to is None} - weight_map.keys():
        checkpoint.notes.append(f"{key} is in {checkpoint.tensors[key].chunks[0].file} but not in the index {index_file.name}")

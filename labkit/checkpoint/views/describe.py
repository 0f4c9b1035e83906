"""The contents of a checkpoint as plain data for programs."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch

from labkit.checkpoint.index.held import Held, missing_files
from labkit.checkpoint.index.model import Checkpoint, Chunk, Section, TensorEntry
from labkit.checkpoint.index.sections import wrappers_of
from labkit.checkpoint.pickles.pickle_records import UnsupportedTensor
from labkit.checkpoint.views.small_values import SmallValue, short, small_values

SECTIONS: tuple[Section, ...] = ("model", "optimizer", "other")


def dtype_text(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def select(checkpoint: Checkpoint, patterns: Sequence[str]) -> list[TensorEntry]:
    """Return the tensors whose name matches one of the patterns (``*`` and ``?``); all of them if there is no pattern."""
    return [entry for entry in checkpoint.tensors.values() if matches(entry.key, patterns)]


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Return whether a name matches one of the patterns, or there are none."""
    return not patterns or any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def describe(checkpoint: Checkpoint, *, patterns: Sequence[str] = (), chunks: bool = False) -> dict[str, Any]:
    """Describe a checkpoint as plain data, ready for JSON.

    Args:
        checkpoint: An opened checkpoint.
        patterns: Include only tensors and values whose name matches one of these; the totals always cover everything.
        chunks: Whether to list each chunk with its file, byte range, box and writing rank.

    Values of up to 64 KiB are read. Names in their pickles outside the allow-list are reported, not run.

    Ranks: local.
    """
    values = list(small_values(checkpoint, (value for value in checkpoint.values.values() if matches(value.key, patterns))))
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.kind,
        "step": checkpoint.step,
        "metadata": checkpoint.metadata,
        "totals": totals(checkpoint),
        "wrappers": wrappers_of(checkpoint),
        "tied": ties(checkpoint),
        "notes": checkpoint.notes,
        "opaque": sorted({*checkpoint.opaque, *(name for value in values for name in value.asks_for)}),
        "files": checkpoint.files,
        "missing": [_missing(name, held) for name, held in missing_files(checkpoint).items()],
        "tensors": [_tensor(entry, chunks) for entry in select(checkpoint, patterns)],
        "values": [_value(value) for value in values],
    }


def _missing(name: str, held: Held) -> dict[str, Any]:
    fields = ("num_tensors", "num_values", "size_bytes", "first")
    return {"file": name, **{field: getattr(held, field) for field in fields}}


def totals(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return counts and bytes, in total and per section. A tied tensor counts under each name, its bytes and elements once."""
    result: dict[str, Any] = {
        "num_tensors": len(checkpoint.tensors),
        "num_values": len(checkpoint.values),
        "num_chunks": checkpoint.num_chunks,
        "num_files": len(checkpoint.files),
        "size_bytes": checkpoint.size_bytes,
        "file_bytes": sum(size for size in checkpoint.files.values() if size > 0),
    }
    for section in SECTIONS:
        every = list(checkpoint.section(section))
        entries = [entry for entry in every if entry.tied_to is None]
        result[section] = {
            "num_tensors": len(every),
            "num_elements": sum(entry.numel for entry in entries),
            "size_bytes": sum(entry.size_bytes for entry in entries),
        }
    return result


def ties(checkpoint: Checkpoint) -> list[list[str]]:
    """Return groups of names that share their bytes in the file."""
    groups: dict[str, list[str]] = {}
    for entry in checkpoint.tensors.values():
        if entry.tied_to is not None:
            groups.setdefault(entry.tied_to, [entry.tied_to]).append(entry.key)
    return list(groups.values())


def _tensor(entry: TensorEntry, chunks: bool) -> dict[str, Any]:
    result: dict[str, Any] = {
        "key": entry.key,
        "shape": list(entry.shape),
        "dtype": dtype_text(entry.dtype),
        "size_bytes": entry.size_bytes,
        "section": entry.section,
        "num_chunks": len(entry.chunks),
        "files": entry.chunks.file_names(),
    }
    if entry.tied_to is not None:
        result["tied_to"] = entry.tied_to
    if entry.replicas:
        result["num_replicas"] = len(entry.replicas)
    if entry.flat:
        result["flat"] = True
    if chunks:
        result["chunks"] = [_chunk(chunk) for chunk in entry.chunks]
    return result


def _chunk(chunk: Chunk) -> dict[str, Any]:
    return {
        "offsets": list(chunk.offsets),
        "sizes": list(chunk.sizes),
        "file": chunk.file,
        "start": chunk.start,
        "length": chunk.length,
        "writer": chunk.writer,
    }


def _value(found: SmallValue) -> dict[str, Any]:
    entry, content = found.entry, found.content
    result: dict[str, Any] = {"key": entry.key, "section": entry.section, "file": entry.file}
    if entry.length:
        result["length"] = entry.length
    if found.asks_for:
        result["asks_for"] = list(found.asks_for)
    elif found.unread:
        result["unread"] = found.unread
    elif isinstance(content, UnsupportedTensor):
        result["unsupported"] = content.what
    elif content is None or isinstance(content, str | bool | float) or (isinstance(content, int) and content.bit_length() < 64):
        result["value"] = content
    else:
        result["repr"] = short(content)
    return result

"""Step directories and the manifest that makes one complete.

A store is a directory of ``step_00000010`` directories. A step is complete once it has a ``manifest.json``, which a save creates
last, by an atomic rename. The manifest holds the size and hash of every other file in the step. ``latest`` searches for manifests,
so there is no pointer that could move too early or get lost.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from labkit.checkpoint.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
)
from labkit.checkpoint.files import direct_io
from labkit.checkpoint.files.plain_files import is_inside, open_regular, parse_json, read_regular

MANIFEST_FILE = "manifest.json"
_EARLIER = "Use an earlier step."
FORMAT = "labkit-checkpoint"
VERSION = 1
_STEP = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")  # exactly as step_directory writes it, so that each step has only one name


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file's size in bytes and its xxh3-128 hash, in hexadecimal."""

    size: int
    hash: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a complete checkpoint.

    Attributes:
        files: File name to size and hash, for every file but the manifest.
        step: The training step, or None for a checkpoint outside a store.
        world_size: The number of ranks that wrote it.
        about: Free-form facts: versions, the time, the source.
    """

    files: Mapping[str, FileSum]
    step: int | None = None
    world_size: int = 1
    about: Mapping[str, Any] = field(default_factory=dict)


def hash_bytes(data: Any) -> str:
    """Return the xxh3-128 hash of a bytes-like object, which protects against accidents and mix-ups, not forgery."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_file(path: Path, *, from_disk: bool = False) -> FileSum:
    """Hash a file's content.

    Args:
        path: The file.
        from_disk: Bypass the page cache; if the file system does not support that, first ask the kernel to drop the pages (only a
            hint).

    Ranks: local. Blocks for one read of the file.
    """
    digest, size = xxhash.xxh3_128(), 0
    with open_regular(path) as file:
        fd = file.fileno()
        direct = from_disk and direct_io.set_direct(fd, on=True)
        if from_disk and not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        block = direct_io.aligned_block()
        while True:
            try:
                count = os.readv(fd, [block])
            except OSError as error:
                if not (direct and direct_io.is_misaligned(error)):
                    raise
                direct = direct_io.set_direct(fd, on=False)
                continue
            if not count:
                return FileSum(size, digest.hexdigest())
            digest.update(block[:count])
            size += count


def publish(directory: Path, manifest: Manifest) -> None:
    """Write the manifest into a directory: sync it and the directory to disk, then rename it atomically.

    Raises:
        OSError: The manifest cannot be written; the directory then stays incomplete.
    """
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "hash": "xxh3_128",
        "about": dict(manifest.about),
        "files": {name: asdict(total) for name, total in sorted(manifest.files.items())},
    }
    body["self"] = hash_bytes(_canonical(body))
    write_atomically(directory / MANIFEST_FILE, json.dumps(body, indent=1).encode())


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file beside its final path, sync it to disk, and rename it to that path."""
    # Other users may be able to write here too, so the name cannot be guessed, and no existing file is opened.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(16)}.tmp")
    with temporary.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)
    temporary.rename(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Sync a directory's entries to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read(directory: Path) -> Manifest | None:
    """Return the manifest of a directory, or None if it has none.

    Raises:
        CorruptCheckpointError: The manifest itself is damaged, or lists something outside the directory.
        CheckpointFormatError: Its version is not the one that this labkit reads.
    """
    path = directory / MANIFEST_FILE
    try:
        body = parse_json(read_regular(path))
    except FileNotFoundError:
        return None
    except ValueError:
        raise CorruptCheckpointError(path, "it cannot be read. Use an earlier step.") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        return None  # some other tool's manifest.json
    if body.get("version") != VERSION:
        raise CheckpointFormatError(path, f"it has version {body.get('version')!r}; this labkit reads version {VERSION}")
    expected = body.pop("self", None)
    if expected != hash_bytes(_canonical(body)):
        raise CorruptCheckpointError(path, "its text does not match its own hash. Use an earlier step.")
    try:
        files = {name: FileSum(**total) for name, total in body["files"].items()}
        found = Manifest(files, body["step"], body["world_size"], body["about"])
    except (KeyError, TypeError, AttributeError):
        raise CorruptCheckpointError(path, "it has another form than labkit writes. Use an earlier step.") from None
    _check_form(path, found)
    return found


def _check_form(path: Path, found: Manifest) -> None:
    # The manifest's own hash does not prove who wrote it, because anyone can compute one.
    outside = [name for name in found.files if not is_inside(name) or name == MANIFEST_FILE]
    if outside:
        raise CorruptCheckpointError(path, f"it lists {outside[0]!r}, which is not a file of this directory. Use an earlier step.")
    numbers = [found.world_size, *([] if found.step is None else [found.step]), *(total.size for total in found.files.values())]
    texts = [total.hash for total in found.files.values()]
    if not (
        all(type(number) is int and number >= 0 for number in numbers)
        and all(isinstance(text, str) for text in texts)
        and isinstance(found.about, dict)
    ):
        raise CorruptCheckpointError(path, "it has another form than labkit writes. Use an earlier step.")


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def check_file(directory: Path, name: str, expected: FileSum, *, content: bool = True, from_disk: bool = False) -> None:
    """Compare a file with its entry in the manifest.

    Raises:
        IncompleteCheckpointError: It is missing or has a different size.
        CorruptCheckpointError: Its content has a different hash.
    """
    path = directory / name
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise IncompleteCheckpointError(path, "the manifest lists this file, but it is missing", advice=_EARLIER) from None
    if size != expected.size:
        raise IncompleteCheckpointError(path, f"it has {size} bytes, and {expected.size} were written", advice=_EARLIER)
    if content and hash_file(path, from_disk=from_disk).hash != expected.hash:
        raise CorruptCheckpointError(
            path,
            "its bytes are not the ones that were written (a damaged disk, an overwrite, or a file of another checkpoint). "
            "Use an earlier step.",
        )


def step_directory(store: Path, step: int) -> Path:
    """Return the directory of a step in a store."""
    return store / f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in a directory's name, or None."""
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def is_store(path: Path) -> bool:
    """Return whether a directory holds step directories."""
    return any(step_of(child) is not None for child in path.iterdir() if child.is_dir())


def complete_steps(store: Path) -> list[int]:
    """Return the steps with a manifest, ascending; an empty list if the store does not exist."""
    if not store.is_dir():
        return []
    children = ((step_of(child), child) for child in store.iterdir())
    return sorted(step for step, child in children if step is not None and (child / MANIFEST_FILE).is_file())


def latest(store: Path) -> Path:
    """Return the directory of the highest complete step.

    Raises:
        CheckpointNotFoundError: The store has no complete step.
    """
    steps = complete_steps(store)
    if not steps:
        raise CheckpointNotFoundError(store, "it has no complete step: no step directory has a manifest.json")
    return step_directory(store, steps[-1])

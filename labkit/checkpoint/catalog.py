"""Open any checkpoint: find out what wrote it and read its index. Nothing in the file is run, no tensor is built."""

from __future__ import annotations

from pathlib import Path

from labkit.checkpoint import manifest, sections
from labkit.checkpoint.dcp_format import METADATA_FILE, read_dcp
from labkit.checkpoint.errors import CheckpointFormatError, CheckpointNotFoundError, IncompleteCheckpointError
from labkit.checkpoint.model import Checkpoint, tie
from labkit.checkpoint.plain_files import open_regular, refuse_special
from labkit.checkpoint.safe_pickle import Unknown
from labkit.checkpoint.safetensors_format import INDEX_SUFFIX, read_safetensors
from labkit.checkpoint.staging_area import GO_ON, is_partial, partial_folder
from labkit.checkpoint.torch_format import INDEX_FILE, read_torch, torch_files

_UNFINISHED = f"is what an unfinished run of migrate or reshard has left: {GO_ON}"


def open_checkpoint(path: str | Path, *, unknown: Unknown = "refuse") -> Checkpoint:
    """Read a checkpoint's index, whatever wrote it.

    Args:
        path: A DCP directory, a store made by :func:`labkit.checkpoint.save` (its latest complete step is taken), a
            torch.save file or a directory of them, or safetensors (a file, an index, a directory).
        unknown: ``refuse`` a pickle that names anything outside the allow-list, or keep such parts ``opaque``: they are
            listed and stay unread. Neither runs anything.

    Returns:
        The checkpoint's entries with the byte ranges of their data.

    Raises:
        CheckpointNotFoundError: Nothing is there, or the store has no complete step.
        UnsafeCheckpointError: A pickle names something outside the allow-list.
        IncompleteCheckpointError: Part of the index is missing or cut off.
        CheckpointFormatError: The file is no checkpoint that labkit knows, or a FIFO, socket or device.

    Ranks: local. Blocks for as long as reading the indices takes; data are not read.
    """
    path = Path(path)
    if not path.exists():
        beside = partial_folder(path)
        raise CheckpointNotFoundError(
            path, "there is no such file or directory" + (f". {beside} {_UNFINISHED}" if beside.is_dir() else "")
        )
    refuse_special(path)
    if path.is_dir() and is_partial(path):
        raise IncompleteCheckpointError(path, f"it {_UNFINISHED}")
    return read_checkpoint(path, unknown=unknown)


def read_checkpoint(path: Path, *, unknown: Unknown = "refuse") -> Checkpoint:
    """As :func:`open_checkpoint`, of what is there, also where a run that writes it has not finished."""
    step = manifest.step_of(path)
    if path.is_dir() and manifest.is_store(path):
        path = manifest.latest(path)
        step = manifest.step_of(path)
    checkpoint = _read(path, unknown)
    checkpoint.step = step
    sections.classify(checkpoint)
    if checkpoint.kind == "dcp":
        # Only labkit writes a tie so. In optimizer state, which has none, two entries in one place are a fault.
        tie(checkpoint.section("model"))
    return checkpoint


def _read(path: Path, unknown: Unknown) -> Checkpoint:
    if path.is_file():
        return _read_file(path, unknown)
    if (path / METADATA_FILE).exists():
        return read_dcp(path, unknown=unknown)
    if any(path.glob("*" + INDEX_SUFFIX)) or any(path.glob("*.safetensors")):
        return read_safetensors(path)
    if (path / INDEX_FILE).exists() or torch_files(path):
        return read_torch(path, unknown=unknown)
    if any(path.glob("__*_*.distcp")):
        raise IncompleteCheckpointError(path, "it has .distcp files and no .metadata: the save into it did not finish")
    raise CheckpointNotFoundError(path, "the directory holds no checkpoint that labkit knows (DCP, torch.save, safetensors)")


def _read_file(path: Path, unknown: Unknown) -> Checkpoint:
    if path.name == METADATA_FILE or path.suffix == ".distcp":
        return read_dcp(path.parent, unknown=unknown)
    if path.name.endswith(INDEX_SUFFIX) or path.suffix == ".safetensors":
        return read_safetensors(path)
    with open_regular(path) as file:
        magic = file.read(16) or b""
    if magic[:2] == b"PK" or magic[:1] == b"\x80" or not magic:
        return read_torch(path, unknown=unknown)
    if magic[8:9] == b"{":
        return read_safetensors(path)
    raise CheckpointFormatError(path, "it is no torch.save file, no safetensors file and no DCP metadata")

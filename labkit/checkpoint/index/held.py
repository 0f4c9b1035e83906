"""Summaries of each file's contents according to the index: which entries, and how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from labkit.checkpoint.index.model import Checkpoint, TensorEntry, ValueEntry
from labkit.checkpoint.wording import bytes_text, counted, listed, quoted

_FIRST = 3
_MOST_FOLDERS = 1000


@dataclass
class Held:
    """The contents of a file, or of a part of it.

    Attributes:
        num_tensors, num_values: The number of tensors with elements in it, and of values.
        size_bytes: The tensors' bytes, without the format's overhead.
        first: The names of the first tensors; if there are none, of the first values.
        end: The minimum size of the file in bytes.
    """

    num_tensors: int = 0
    num_values: int = 0
    size_bytes: int = 0
    first: list[str] = field(default_factory=list)
    end: int = 0

    def add(self, entry: TensorEntry | ValueEntry, size_bytes: int, end: int = 0) -> None:
        """Count an entry with all its parts; call this for tensors before values."""
        is_tensor = isinstance(entry, TensorEntry)
        self.num_tensors += is_tensor
        self.num_values += not is_tensor
        self.size_bytes += size_bytes
        self.end = max(self.end, end)
        if len(self.first) < _FIRST and (is_tensor or not self.num_tensors):
            self.first.append(entry.key)

    @property
    def text(self) -> str:
        """The contents in words: ``6 tensors or parts of them, 312 B (a, b, c and 3 more), and 2 values``."""
        if not self.num_tensors:
            return f"{counted(self.num_values, 'value')} ({listed(self.first, self.num_values)})"
        what = "1 tensor or a part of it" if self.num_tensors == 1 else f"{self.num_tensors:,} tensors or parts of them"
        values = f", and {counted(self.num_values, 'value')}" if self.num_values else ""
        return f"{what}, {bytes_text(self.size_bytes)} ({listed(self.first, self.num_tensors)}){values}"


def held_in_files(checkpoint: Checkpoint) -> dict[str, Held]:
    """Summarise, per file, which entries and how many bytes the index places in it; copies in other rank files count too."""
    shares = _Shares()
    for entry in checkpoint.tensors.values():
        shares.add(entry)
    result = shares.held()
    for value in checkpoint.values.values():
        result.setdefault(value.file, Held()).add(value, 0, value.start + value.length)
    return result


def missing_files(checkpoint: Checkpoint) -> dict[str, Held]:
    """Return the contents of the files that the index names and that are missing."""
    missing = {name for name, size in checkpoint.files.items() if size < 0}
    return {name: held for name, held in held_in_files(checkpoint).items() if name in missing} if missing else {}


def also_in(root: Path, name: str) -> str:
    """Return a sentence about a file of the same name in a sibling folder of the checkpoint's; an empty string if there is none.

    If each node saves to its own disk, each has a folder with its ranks' files, and only one has the index.

    Args:
        root: The checkpoint's folder, in which the file is missing.
        name: The file, relative to it.
    """
    parent = root.parent if root.name else root.resolve().parent
    try:
        folders = sorted(islice((child for child in parent.iterdir() if child.is_dir()), _MOST_FOLDERS))
        found = [folder for folder in folders if (folder / name).is_file()]
    except OSError:
        return ""
    return f"A file of this name is in {quoted(found[0])}: if it is from the same save, copy it here" if found else ""


class _Shares:
    """The tensors' parts in each file, stored as columns because 10,000 tensors in 1,024 files have ten million parts."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._lists: dict[int, tuple[Sequence[str], npt.NDArray[np.int64]]] = {}
        # One column per file: number of tensors, their bytes, the end of the last.
        self._columns = np.zeros((3, 0), np.int64)
        self._first: dict[int, list[str]] = {}

    def add(self, entry: TensorEntry) -> None:
        """Count a tensor with all its copies."""
        tables = [entry.chunks, *entry.replicas]
        files = np.concatenate([self._numbers(table.files)[table.file_ids] for table in tables])
        tensors, sizes, ends = self._columns  # as wide as the number of files so far, or wider
        np.add.at(sizes, files, np.concatenate([table.sizes.prod(axis=1) for table in tables]) * entry.dtype.itemsize)
        np.maximum.at(ends, files, np.concatenate([table.starts + table.lengths for table in tables]))
        files = np.unique(files)
        for file in files[tensors[files] < _FIRST].tolist():
            self._first.setdefault(file, []).append(entry.key)
        tensors[files] += 1

    def _numbers(self, files: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the numbers of a table's files. Tables mostly share one list of files; keep it, so that its id stays unique."""
        if id(files) not in self._lists:
            numbers = [self._names.setdefault(name, len(self._names)) for name in files]
            self._lists[id(files)] = files, np.array(numbers, dtype=np.int64)
            if len(self._names) > self._columns.shape[1]:
                self._columns = np.pad(self._columns, ((0, 0), (0, 2 * len(self._names) - self._columns.shape[1])))
        return self._lists[id(files)][1]

    def held(self) -> dict[str, Held]:
        """Return the contents of each file, in the order in which tensors use them."""
        names = list(self._names)
        counts = self._columns.T.tolist()
        return {
            names[file]: Held(num_tensors=counts[file][0], size_bytes=counts[file][1], first=first, end=counts[file][2])
            for file, first in self._first.items()
        }

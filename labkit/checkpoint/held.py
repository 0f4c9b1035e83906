"""What the index says that each file holds: how much of which entries."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from labkit.checkpoint.model import Checkpoint, ChunkTable, TensorEntry, ValueEntry
from labkit.checkpoint.wording import bytes_text, counted, listed

_FIRST = 3


@dataclass
class Held:
    """What a file, or some part of it, holds.

    Attributes:
        num_tensors, num_values: How many tensors have elements in it, how many values lie in it.
        size_bytes: The tensors' bytes, without what the format adds.
        first: The names of the first tensors; of the first values where there are no tensors.
        end: How many bytes the file has to have.
    """

    num_tensors: int = 0
    num_values: int = 0
    size_bytes: int = 0
    first: list[str] = field(default_factory=list)
    end: int = 0

    def add(self, entry: TensorEntry | ValueEntry, size_bytes: int, end: int = 0) -> None:
        """Count an entry; all parts of it at once, and tensors before values."""
        is_tensor = isinstance(entry, TensorEntry)
        self.num_tensors += is_tensor
        self.num_values += not is_tensor
        self.size_bytes += size_bytes
        self.end = max(self.end, end)
        if len(self.first) < _FIRST and (is_tensor or not self.num_tensors):
            self.first.append(entry.key)

    @property
    def text(self) -> str:
        """In words: ``6 tensors or parts of them, 312 B (a, b, c and 3 more), and 2 values``."""
        if not self.num_tensors:
            return f"{counted(self.num_values, 'value')} ({listed(self.first, self.num_values)})"
        what = "1 tensor or a part of it" if self.num_tensors == 1 else f"{self.num_tensors:,} tensors or parts of them"
        values = f", and {counted(self.num_values, 'value')}" if self.num_values else ""
        return f"{what}, {bytes_text(self.size_bytes)} ({listed(self.first, self.num_tensors)}){values}"


def held_in_files(checkpoint: Checkpoint) -> dict[str, Held]:
    """What each file of a checkpoint holds, by name; copies from other rank files count too."""
    result: dict[str, Held] = {}
    for entry in checkpoint.tensors.values():
        shares: dict[str, tuple[int, int]] = {}
        for table in (entry.chunks, *entry.replicas):
            for name, size, end in _shares(table, entry.dtype.itemsize):
                before = shares.get(name, (0, 0))
                shares[name] = before[0] + size, max(before[1], end)
        for name, (size, end) in shares.items():
            result.setdefault(name, Held()).add(entry, size, end)
    for value in checkpoint.values.values():
        result.setdefault(value.file, Held()).add(value, 0, value.start + value.length)
    return result


def missing_files(checkpoint: Checkpoint) -> dict[str, Held]:
    """What was in the files that the index names and that are not there."""
    missing = {name for name, size in checkpoint.files.items() if size < 0}
    return {name: held for name, held in held_in_files(checkpoint).items() if name in missing} if missing else {}


def _shares(table: ChunkTable, itemsize: int) -> list[tuple[str, int, int]]:
    """Each file of a table with the bytes of the tensor that it holds and where the last of them ends."""
    ids, places = np.unique(table.file_ids, return_inverse=True)
    sizes, ends = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
    np.add.at(sizes, places, table.sizes.prod(axis=1) * itemsize)
    np.maximum.at(ends, places, table.starts + table.lengths)
    return [
        (table.files[file_id], size, end) for file_id, size, end in zip(ids.tolist(), sizes.tolist(), ends.tolist(), strict=True)
    ]

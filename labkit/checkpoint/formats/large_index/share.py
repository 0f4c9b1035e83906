"""One reader's share of a large ``.metadata``: it reads blocks, keeps their pairs, and later notes each chunk's place.

Needs no torch, because it also runs in separate processes (:mod:`labkit.checkpoint.formats.large_index.readers`).
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from labkit.checkpoint.formats.large_index.block_reader import BlockReader
from labkit.checkpoint.formats.large_index.block_source import Blocks
from labkit.checkpoint.formats.large_index.parts import Int64s, Pairs, Part, Placing, require

_NAME_PUT = 2  # a pair memoizes its key, the key's state, then its name
_ITEM = 8


class Tables:
    """The columns that all readers share: offsets and places of all chunks.

    Args:
        shape: Number of rows, and most dims.
        file: The descriptor of a file of the same size; None if all readers are in this process.

    Attributes:
        offsets: (rows, most dims).
        places: (rows, 3): number of the file, start, length.
    """

    def __init__(self, shape: tuple[int, int], file: int | None = None) -> None:
        rows, dims = shape
        memory = mmap.mmap(-1 if file is None else file, max(self.size(shape), 1))
        self.offsets: Int64s = np.ndarray((rows, dims), np.int64, memory)
        self.places: Int64s = np.ndarray((rows, 3), np.int64, memory, rows * dims * _ITEM)

    @staticmethod
    def size(shape: tuple[int, int]) -> int:
        """Return the bytes of columns of this shape."""
        return shape[0] * (shape[1] + 3) * _ITEM


class Share:
    """The work of one reader, step by step.

    Args:
        blocks: The source of its blocks.
        tables_file: As :class:`Tables` takes it.

    Attributes:
        tables: The columns; None if they are in the file.
    """

    def __init__(self, blocks: Blocks, tables_file: int | None = None) -> None:
        self._blocks, self._tables_file = blocks, tables_file
        self._pairs: list[Pairs] = []
        self.tables: Tables | None = None

    def read(self) -> Part:
        """Read blocks until there are none."""
        reader = BlockReader(self._blocks)
        blocks, self._pairs = reader.read_all(), reader.pairs
        names, files = _gets([pairs.name for pairs in self._pairs]), _gets([pairs.file for pairs in self._pairs])
        return Part(blocks, reader.num_spans, reader.names.texts, reader.files.texts, names, files, reader.gets)

    def brought(self, of_files: bool, firsts: Int64s, wanted: Int64s) -> dict[int, int]:
        """Return, for the wanted memo numbers that belong to a file or name in a pair here, the number of that text."""
        result: dict[int, int] = {}
        for pairs in self._pairs:
            column = pairs.file if of_files else pairs.name
            own = np.flatnonzero(column >= 0)
            numbers = (firsts[pairs.span] + pairs.memo + (pairs.puts - 1 if of_files else _NAME_PUT))[own]
            hit = np.flatnonzero(np.isin(numbers, wanted))
            result.update(zip(numbers[hit].tolist(), column[own[hit]].tolist(), strict=True))
        return result

    def place(self, placing: Placing) -> int:
        """Note the place of each pair's chunk, and check that key and chunk have the same offsets. Return the number of pairs."""
        tables = self.tables or Tables(placing.shape, self._tables_file)
        placed = 0
        for pairs in self._pairs:
            before = placing.firsts[pairs.span] + pairs.memo
            tensor = _numbered(pairs.name, placing.tensors, before, placing.name_gets)
            rows = placing.begins[tensor] + pairs.index
            inside = (pairs.index >= 0) & (rows < placing.ends[tensor]) & (pairs.dims == placing.num_dims[tensor])
            require(bool(inside.all()))
            # The number of dims is equal: where one table is wider than the other, the extra columns are zero.
            dims = min(pairs.offsets.shape[1], tables.offsets.shape[1])
            require(bool((tables.offsets.take(rows, axis=0)[:, :dims] == pairs.offsets[:, :dims]).all()))
            file = _numbered(pairs.file, placing.files, before, placing.file_gets)
            tables.places[rows] = np.stack((file, pairs.start, pairs.length), axis=1)
            placed += len(rows)
        return placed


def _changes(texts: npt.NDArray[np.int64]) -> Int64s:
    """Return the positions at which a reference differs from the one before it; neighbours mostly refer to the same text."""
    return np.flatnonzero(np.diff(texts, prepend=0) * (texts < 0))


def _gets(columns: list[Int64s]) -> Int64s:
    """Return the memo numbers that columns of texts refer to, in order."""
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(np.unique(-1 - texts[_changes(texts)]) for texts in columns)]))


def _numbered(texts: Int64s, own: Int64s, before: Int64s, gets: tuple[Int64s, Int64s]) -> Int64s:
    """Return the numbers of texts: of texts in the records themselves, and of earlier texts that they refer to."""
    refers = np.flatnonzero(texts < 0)
    if not len(refers):
        return own[texts]
    result = np.zeros(len(texts), np.int64) if len(refers) == len(texts) else own[np.maximum(texts, 0)]
    references = -1 - texts[refers]
    require(bool((references < before[refers]).all()))
    changes = np.flatnonzero(np.diff(references, prepend=-1))
    memo, numbers = gets
    result[refers] = np.repeat(numbers[np.searchsorted(memo, references[changes])], np.diff(changes, append=len(references)))
    return result

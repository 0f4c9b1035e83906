"""Reading of a large ``.metadata`` in seconds: most of it by array operations, the rest by the restricted unpickler.

A checkpoint of 10,000 tensors by 1,024 ranks has a ``.metadata`` of 1.5 GB, from which an unpickler makes some hundred million
objects. :mod:`labkit.checkpoint.formats.large_index.readers` takes out the records that occur once per chunk; the rest is small and
is unpickled. If anything does not have exactly the expected form, the result is None, and the caller reads the file the slow way.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from labkit.checkpoint.formats.large_index.parts import OTHER_FORM, Int64s, Part, Placing, Run, require
from labkit.checkpoint.formats.large_index.readers import Here, Processes, ReadersLostError, most_rest, readers_of
from labkit.checkpoint.formats.large_index.record_layout import CHUNK, PAIR
from labkit.checkpoint.formats.large_index.records import BulkRecords
from labkit.checkpoint.index.model import writer_rank
from labkit.checkpoint.pickles.pickle_machine import Stateful
from labkit.checkpoint.pickles.pickle_records import Record
from labkit.checkpoint.pickles.safe_machine import SafeMachine

LARGE_BYTES = 1 << 24
_RUN = b"\xff"  # no opcode of pickle
# Errors that the unpickler, or code that uses its result, raises on a damaged or hostile pickle.
_OTHER_FORM = (*OTHER_FORM, pickle.UnpicklingError)
_GETS = {
    CHUNK: (Stateful, "offsets", tuple, "sizes", tuple),
    PAIR: (Stateful, "fqn", "index", "offset", tuple, Stateful, "relative_path", "offset", "length"),
}


@dataclass
class Columns:
    """The chunks of all tensors, in order, and the places of their bytes.

    Attributes:
        state: The metadata, with a :class:`Run` instead of each run in chunk lists and in ``storage_data``.
        bounds: Tensor key to the range of its chunks in the columns.
        offsets, sizes: (chunks, most dims); only as many dims as the tensor has are used.
        places: (chunks, 3): number of the file, start, length; -1 for a chunk whose place is in ``state``.
        files: The files' names.
        opaque: Names outside the allow-list.
    """

    state: dict[str, Any]
    bounds: dict[str, tuple[int, int]]
    offsets: Int64s
    sizes: Int64s
    places: Int64s
    files: list[str]
    opaque: tuple[str, ...]


def read_large(file: BinaryIO, size: int) -> Columns | None:
    """Read a ``.metadata`` of many chunks.

    Args:
        file: The open file, at its beginning.
        size: Its size in bytes.

    Returns:
        Its columns, or None if the pickle does not have the form that DCP writes: it may be damaged, hostile or of another
        version.

    Ranks: local.
    """
    try:
        try:
            with readers_of(file.fileno()) as readers:
                return _read(file.fileno(), size, readers)
        except ReadersLostError:
            with closing(Here(file.fileno())) as reader:
                return _read(file.fileno(), size, reader)
    except _OTHER_FORM:
        return None


def _read(file: int, size: int, readers: Here | Processes) -> Columns:
    head = os.pread(file, 2, 0)
    require(size > 11 and head[0] == 0x80 and head[1] in (4, 5))
    bulk = BulkRecords(readers.read(), most_rest(size))
    rest = _RestReader(_RUN.join(bulk.gaps), bulk.runs)
    metadata = rest.load()
    require(isinstance(metadata, Record) and rest.seen == len(bulk.runs))
    require(all(tuple(rest.memo.get(number) for number in gets) == _GETS[form] for part in bulk.parts for form, gets in part.gets))
    bounds, boxes = _chunks(metadata.state["state_dict_metadata"], bulk)
    tables = readers.tables((sum(len(offsets) for offsets, _ in boxes), max(offsets.shape[1] for offsets, _ in boxes)))
    _stack([offsets for offsets, _ in boxes], tables.offsets)
    sizes = np.zeros(tables.offsets.shape, np.int64)
    _stack([own for _, own in boxes], sizes)
    tables.places.fill(-1)
    columns = Columns(metadata.state, bounds, tables.offsets, sizes, tables.places, [], tuple(sorted(rest.unknown)))
    _place(columns, bulk, rest, readers)
    return columns


class _Memo(dict[int, Any]):
    """The unpickler's memo, in which runs that were taken out also use up numbers."""

    count = 0

    def append(self, item: Any) -> None:
        """Give the next number to an object."""
        self[self.count] = item
        self.count += 1

    def __len__(self) -> int:
        return self.count


class _RestReader(SafeMachine):
    """The reader of a pickle whose runs are taken out; a special opcode marks each run.

    A run of chunks leaves its :class:`Run` on the stack. A run of pairs leaves its :class:`Run` and None, as an item of a dict.
    """

    def __init__(self, data: bytes, runs: list[Run]) -> None:
        super().__init__(data)
        self.memo = _Memo()
        self._runs, self.seen = runs, 0

    def other(self, code: int) -> None:
        if code != _RUN[0]:
            super().other(code)
        run = self._runs[self.seen]
        run.first = self.memo.count
        self.memo.count += run.puts
        self.seen += 1
        self.stack.append(run)
        if run.form == PAIR:
            self.stack.append(None)


def _chunks(described: Mapping[str, Any], bulk: BulkRecords) -> tuple[dict[str, tuple[int, int]], list[tuple[Int64s, Int64s]]]:
    """Return each tensor's range of chunks, and all offsets and sizes in parts."""
    bounds: dict[str, tuple[int, int]] = {}
    listed: list[Run] = []
    boxes: list[tuple[Int64s, Int64s]] = []
    at = 0
    for key, entry in described.items():
        chunks = entry.state.get("chunks")
        if chunks is None:
            continue
        begin, num_dims = at, len(entry.state["size"])
        for item in chunks:
            if isinstance(item, Run):
                require(item.dims == num_dims)
                listed.append(item)
                boxes += item.boxes
                at += item.count
            else:
                (state,) = item
                require(len(state["offsets"]) == len(state["sizes"]) == num_dims)
                boxes.append((np.array([state["offsets"]], dtype=np.int64), np.array([state["sizes"]], dtype=np.int64)))
                at += 1
        bounds[key] = (begin, at)
    # A Run is equal only to itself.
    require(bool(listed) and listed == [run for run in bulk.runs if run.form == CHUNK])
    return bounds, boxes


def _stack(parts: list[Int64s], into: Int64s) -> None:
    """Stack tables into one that is as wide as the widest and filled with zeros."""
    at = 0
    for part in parts:
        into[at : at + len(part), : part.shape[1]] = part
        at += len(part)


def _place(columns: Columns, bulk: BulkRecords, rest: _RestReader, readers: Here | Processes) -> None:
    """Let the readers note the place of each chunk's bytes."""
    state = columns.state
    require([run for run in state["storage_data"] if isinstance(run, Run)] == [run for run in bulk.runs if run.form == PAIR])
    tensors = {key: number for number, key in enumerate(columns.bounds)}
    begins, ends = np.array([*columns.bounds.values()], dtype=np.int64).reshape(-1, 2).T.copy()
    num_dims = np.array([len(state["state_dict_metadata"][key].state["size"]) for key in tensors], dtype=np.int64)
    firsts = [part.firsts() for part in bulk.parts]
    memo = {**rest.memo, **_texts_referred_to(bulk, rest.memo, firsts, readers)}
    names = {_text(name) for part in bulk.parts for name in part.files}
    names |= {memo[get] for part in bulk.parts for get in part.file_gets.tolist()}
    # Sorted, because the readers find them in a random order.
    files = {name: number for number, name in enumerate(sorted(names, key=lambda name: (writer_rank(name) or 0, name)))}

    def placing(part: Part, firsts: Int64s) -> Placing:
        return Placing(
            firsts,
            np.array([tensors[_text(name)] for name in part.names], dtype=np.int64),
            np.array([files[_text(name)] for name in part.files], dtype=np.int64),
            (part.name_gets, np.array([tensors[memo[get]] for get in part.name_gets.tolist()], dtype=np.int64)),
            (part.file_gets, np.array([files[memo[get]] for get in part.file_gets.tolist()], dtype=np.int64)),
            begins,
            ends,
            num_dims,
            columns.offsets.shape,
        )

    placed = sum(readers.each("place", [(placing(*both),) for both in zip(bulk.parts, firsts, strict=True)]))
    columns.files = list(files)
    # Each chunk was placed once, except for those whose key is in the rest.
    require(placed == int((columns.places[:, 0] >= 0).sum()))


def _texts_referred_to(
    bulk: BulkRecords, memo: Mapping[int, Any], firsts: list[Int64s], readers: Here | Processes
) -> dict[int, str]:
    """Return, by memo number, texts that one pair contains and other pairs refer to."""
    left = {get for part in bulk.parts for gets in (part.name_gets, part.file_gets) for get in gets.tolist()} - memo.keys()
    found: dict[int, str] = {}
    for of_files in (True, False):
        if left:
            wanted = np.array(sorted(left), dtype=np.int64)
            numbers = readers.each("brought", [(of_files, own, wanted) for own in firsts])
            for part, by_get in zip(bulk.parts, numbers, strict=True):
                texts = part.files if of_files else part.names
                found |= {get: _text(texts[number]) for get, number in by_get.items()}
            left -= found.keys()
    return found


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")

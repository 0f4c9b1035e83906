"""Read a large ``.metadata`` in seconds: its bulk by array operations, the rest by the restricted unpickler.

A checkpoint of 10,000 tensors by 1,024 ranks has a ``.metadata`` of 1.5 GB, from which an unpickler makes some hundred
million objects. Here the records that occur once per chunk are taken out by
:mod:`labkit.checkpoint.bulk_records`; what is left is
small and is unpickled. Whatever does not have exactly the expected form gives None, and the caller reads the file the slow way.
"""

from __future__ import annotations

import pickle
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, ClassVar

import numpy as np

from labkit.checkpoint.block_reader import BlockReader
from labkit.checkpoint.bulk_parts import OtherFormError, Run
from labkit.checkpoint.bulk_records import BulkRecords
from labkit.checkpoint.model import Int64s
from labkit.checkpoint.record_layout import CHUNK, PAIR
from labkit.checkpoint.safe_pickle import AllowList, Record, Stateful

LARGE_BYTES = 1 << 24
_NAME_PUT = 2  # a pair memoizes its key, the key's state, then its name
_MOST_REST = 1 << 26  # the rest is unpickled at about 10 MB a second
_RUN = b"\xff"  # no opcode of pickle
# What a damaged or hostile pickle makes the unpickler, or the reading of what it made, raise.
_OTHER_FORM = (
    OtherFormError, pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, TypeError,
    ValueError, struct.error,
)  # fmt: skip
_GETS = {
    CHUNK: (Stateful, "offsets", tuple, "sizes", tuple),
    PAIR: (Stateful, "fqn", "index", "offset", tuple, Stateful, "relative_path", "offset", "length"),
}


@dataclass
class Columns:
    """The chunks of all tensors, in order, and where their bytes are.

    Attributes:
        state: The metadata, with a :class:`Run` in place of each run in chunk lists and in ``storage_data``.
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
        Its columns, or None when the pickle has another form than DCP writes; it may then be damaged, or hostile, or of
        another version.

    Ranks: local.
    """
    try:
        return _read(file, size)
    except _OTHER_FORM:
        return None


def _require(condition: bool) -> None:
    if not condition:
        raise OtherFormError


def _read(file: BinaryIO, size: int) -> Columns:
    bulk = BulkRecords(_without_frames(file, size), min(size // 2, _MOST_REST))
    rest = _RestReader(_RUN.join(bulk.gaps), bulk.runs)
    metadata = rest.load()
    _require(isinstance(metadata, Record) and rest.seen == len(bulk.runs))
    _require(
        all(tuple(rest.memo.get(number) for number in gets) == _GETS[form] for reader in bulk.readers for form, gets in reader.gets)
    )
    bounds, offsets, sizes = _chunk_columns(metadata.state["state_dict_metadata"], bulk)
    places = np.full((len(offsets), 3), -1, dtype=np.int64)
    columns = Columns(metadata.state, bounds, offsets, sizes, places, [], tuple(sorted(rest.unknown)))
    _place(columns, bulk, rest)
    return columns


def _without_frames(file: BinaryIO, size: int) -> Callable[[memoryview], int]:
    """What fills memory with the pickle's bytes, headers of frames left out."""
    head = file.read(2)
    _require(size > 11 and head[0] == 0x80 and head[1] in (4, 5))
    left = 0  # of the frame

    def fill(into: memoryview) -> int:
        nonlocal left
        at = 0
        while at < len(into):
            if not left:
                header = file.read(9)
                if not header:
                    break
                _require(len(header) == 9 and header[0] == 0x95)
                (left,) = struct.unpack_from("<Q", header, 1)
            read = file.readinto(into[at : at + left])  # type: ignore[attr-defined]
            _require(read > 0)
            at, left = at + read, left - read
        return at

    return fill


class _RestReader(AllowList, pickle._Unpickler):
    """The restricted unpickler for a pickle whose runs are taken out; an opcode of its own stands for each.

    A run of chunks leaves its :class:`Run` on the stack, and one of pairs the same and None, for a dict. The unpickler in C would
    number what is memoized without the runs, so this is Python's.
    """

    memo: dict[int, Any]
    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        opcode: load
        for opcode, load in pickle._Unpickler.dispatch.items()
        if bytes([opcode]) not in (pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT)
    }

    def __init__(self, data: bytes, runs: list[Run]) -> None:
        super().__init__(data)
        self._runs, self._count, self.seen = runs, 0, 0

    def _memoize(self) -> None:
        self.memo[self._count] = self.stack[-1]
        self._count += 1

    def _run(self) -> None:
        run = self._runs[self.seen]
        run.first = self._count
        self._count += run.puts
        self.seen += 1
        self.stack.append(run)
        if run.form == PAIR:
            self.stack.append(None)

    dispatch[pickle.MEMOIZE[0]] = _memoize
    dispatch[_RUN[0]] = _run


def _chunk_columns(described: Mapping[str, Any], bulk: BulkRecords) -> tuple[dict[str, tuple[int, int]], Int64s, Int64s]:
    """Each tensor's range of chunks, and all offsets and sizes."""
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
                _require(item.dims == num_dims)
                listed.append(item)
                boxes += item.boxes
                at += item.count
            else:
                (state,) = item
                _require(len(state["offsets"]) == len(state["sizes"]) == num_dims)
                boxes.append((np.array([state["offsets"]], dtype=np.int64), np.array([state["sizes"]], dtype=np.int64)))
                at += 1
        bounds[key] = (begin, at)
    # A Run is equal to nothing but itself.
    _require(bool(listed) and listed == [run for run in bulk.runs if run.form == CHUNK])
    return bounds, _stacked([offsets for offsets, _ in boxes]), _stacked([sizes for _, sizes in boxes])


def _stacked(parts: list[Int64s]) -> Int64s:
    """Tables one after the other, as wide as the widest."""
    result = np.zeros((sum(map(len, parts)), max(part.shape[1] for part in parts)), np.int64)
    at = 0
    for part in parts:
        result[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return result


def _place(columns: Columns, bulk: BulkRecords, rest: _RestReader) -> None:
    """Note for each chunk where its bytes are, and check that key and chunk agree on where the chunk lies."""
    state = columns.state
    _require([run for run in state["storage_data"] if isinstance(run, Run)] == [run for run in bulk.runs if run.form == PAIR])
    tensors = {key: number for number, key in enumerate(columns.bounds)}
    begins, ends = np.array([*columns.bounds.values()], dtype=np.int64).reshape(-1, 2).T.copy()
    num_dims = np.array([len(state["state_dict_metadata"][key].state["size"]) for key in tensors], dtype=np.int64)
    memo = {**rest.memo, **_texts_referred_to(bulk, rest.memo)}
    files: dict[str, int] = {}
    several = threading.Lock()

    def file_number(name: str) -> int:
        with several:
            return files.setdefault(name, len(files))

    def place(reader: BlockReader) -> int:
        own_tensors = np.array([tensors[_text(name)] for name in reader.names.texts], dtype=np.int64)
        own_files = np.array([file_number(_text(name)) for name in reader.files.texts], dtype=np.int64)
        for pairs in reader.pairs:
            before = pairs.before()
            tensor = _numbered(pairs.name, own_tensors, before, memo, tensors.__getitem__)
            rows = begins[tensor] + pairs.index
            _require(bool(((pairs.index >= 0) & (rows < ends[tensor]) & (pairs.dims == num_dims[tensor])).all()))
            # Equally many dims: what one table is wider than the other by is zero.
            dims = min(pairs.offsets.shape[1], columns.offsets.shape[1])
            _require(bool((columns.offsets.take(rows, axis=0)[:, :dims] == pairs.offsets[:, :dims]).all()))
            file = _numbered(pairs.file, own_files, before, memo, file_number)
            columns.places[rows] = np.stack((file, pairs.start, pairs.length), axis=1)
        return sum(len(pairs.name) for pairs in reader.pairs)

    placed = sum(bulk.each_reader(place))
    columns.files = list(files)
    # Each chunk was placed once, but for those whose key stayed in the rest.
    _require(placed == int((columns.places[:, 0] >= 0).sum()))


def _numbered(texts: Int64s, own: Int64s, before: Int64s, memo: Mapping[int, Any], number_of: Callable[[Any], int]) -> Int64s:
    """The numbers of texts: those that records bring along, and those that they refer to and that were memoized before."""
    refers = np.flatnonzero(texts < 0)
    if not len(refers):
        return own[texts]
    result = np.zeros(len(texts), np.int64) if len(refers) == len(texts) else own[np.maximum(texts, 0)]
    references = -1 - texts[refers]
    _require(bool((references < before[refers]).all()))
    # Neighbours mostly refer to the same.
    changes = np.flatnonzero(np.diff(references, prepend=-1))
    numbers = np.array([number_of(memo[reference]) for reference in references[changes].tolist()], dtype=np.int64)
    result[refers] = np.repeat(numbers, np.diff(changes, append=len(references)))
    return result


def _texts_referred_to(bulk: BulkRecords, memo: Mapping[int, Any]) -> dict[int, str]:
    """By memo number, the texts that a pair brings along and another refers to."""

    def wanted(reader: BlockReader) -> set[int]:
        numbers: set[int] = set()
        for pairs in reader.pairs:
            for texts in (pairs.file, pairs.name):
                # Neighbours mostly refer to the same.
                changes = np.flatnonzero(np.diff(texts, prepend=0) * (texts < 0))
                numbers.update((-1 - texts[changes]).tolist())
        return numbers

    def brought(reader: BlockReader, of_files: bool, left: list[int]) -> dict[int, str]:
        texts = reader.files.texts if of_files else reader.names.texts
        result: dict[int, str] = {}
        for pairs in reader.pairs:
            column = pairs.file if of_files else pairs.name
            own = np.flatnonzero(column >= 0)
            numbers = pairs.before()[own] + (pairs.puts[own] - 1 if of_files else _NAME_PUT)
            hit = np.flatnonzero(np.isin(numbers, left))
            result |= {n: _text(texts[text]) for n, text in zip(numbers[hit].tolist(), column[own[hit]].tolist(), strict=True)}
        return result

    left = set().union(*bulk.each_reader(wanted)) - memo.keys()
    found: dict[int, str] = {}
    for of_files in (True, False):
        if left:
            for part in bulk.each_reader(partial(brought, of_files=of_files, left=sorted(left))):
                found |= part
            left -= found.keys()
    return found


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")

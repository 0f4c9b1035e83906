"""Read the records that make up most of a large ``.metadata`` by array operations instead of one by one.

Three classes occur once per chunk: where a chunk lies in its tensor, its key, and where its bytes are. Their pickles all have
one form, ``class ) NEWOBJ MEMOIZE } MEMOIZE ( key value ... u b``, whose values are numbers, texts, sizes, or references. Only
a few layouts of this form occur, since a number takes one, two or four bytes. :class:`Scanner` takes one record apart, finds
all others with the same fixed bytes by comparing eight bytes at a time, and reads their values at the same places. It
knows nothing of what the records mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from labkit.checkpoint.model import Int64s

NUMBER, TEXT, SIZE, REFERENCE, NOTHING = range(5)
MAX_DIMS = 8
CHUNK, KEY, PLACE = range(3)
PAD_BYTES = 600  # no record of the form is longer: three texts of 255 bytes would be, and are left to the slow way
_BLOCK = 1 << 26
_MAX_RECORD = 512
_MAX_LAYOUTS = 64
_THREADS = 2
_HEAD = b")\x81\x94}\x94("
_ROLES = {(SIZE, SIZE): CHUNK, (TEXT, NUMBER, SIZE): KEY, (TEXT, NUMBER, NUMBER): PLACE}
_INTS = {ord("K"): 1, ord("M"): 2, ord("J"): 4}


@dataclass(frozen=True)
class Field:
    """One value of a layout: its kind, where its payload is from the record's start, and how many bytes it has.

    Attributes:
        memo: For a text or size: its memo number, counted from the record's first.
        dims: For a size: place and bytes of each extent.
    """

    kind: int
    at: int = 0
    width: int = 0
    memo: int = 0
    dims: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Layout:
    """A record's form, read off one record."""

    cls: int
    keys: tuple[int, ...]
    fields: tuple[Field, ...]
    length: int
    puts: int
    words: tuple[tuple[int, int, int], ...]
    """Place, mask and value of the fixed bytes, eight at a time."""
    role: int
    """What it can only be, by the kinds of its values: CHUNK, KEY or PLACE."""


class _Parser:
    """Takes one record apart; the bytes that may differ between records of one layout are noted as free."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.puts = data, 0, 0
        self.free: list[tuple[int, int]] = []

    def layout(self) -> Layout | None:
        try:
            return self._layout()
        except (IndexError, struct.error):
            return None

    def _layout(self) -> Layout | None:
        cls = self._get()
        if cls is None or self.data[self.at : self.at + len(_HEAD)] != _HEAD:
            return None
        self.at, self.puts = self.at + len(_HEAD), 2
        keys: list[int] = []
        fields: list[Field] = []
        while self.data[self.at] != ord("u"):
            key = self._get()
            value = None if key is None or len(keys) == 3 else self._value()
            if key is None or value is None:
                return None
            keys.append(key)
            fields.append(value)
        if self.data[self.at + 1] != ord("b") or not keys or self.at + 2 > _MAX_RECORD:
            return None
        self.at += 2
        role = _ROLES.get(tuple(TEXT if value.kind == REFERENCE else value.kind for value in fields))
        return None if role is None else Layout(cls, tuple(keys), tuple(fields), self.at, self.puts, tuple(self._words()), role)

    def _words(self) -> Iterator[tuple[int, int, int]]:
        fixed = bytearray(b"\xff" * self.at)
        for at, width in self.free:
            fixed[at : at + width] = bytes(width)
        for at in range(0, self.at, 8):
            mask = int.from_bytes(fixed[at : at + 8], "little")
            value = int.from_bytes(self.data[at : min(at + 8, self.at)], "little")
            yield at, mask, value & mask

    def _get(self) -> int | None:
        op = self.data[self.at]
        if op == ord("h"):
            self.at += 2
            return self.data[self.at - 1]
        if op == ord("j"):
            self.at += 5
            return int(struct.unpack_from("<I", self.data, self.at - 4)[0])
        return None

    def _int(self) -> tuple[int, int] | None:
        """Place and bytes of a number's payload."""
        op = self.data[self.at]
        if op in _INTS:
            place = self.at + 1, _INTS[op]
        elif op == 0x8A and 1 <= self.data[self.at + 1] <= 8:
            place = self.at + 2, self.data[self.at + 1]
        else:
            return None
        self.free.append(place)
        self.at = place[0] + place[1]
        return place

    def _value(self) -> Field | None:
        op = self.data[self.at]
        number = self._int()
        if number is not None:
            # The payload's width is told by the opcode, which is fixed; LONG1 is signed in its own width.
            return Field(NUMBER, *number)
        if op == ord("N"):
            self.at += 1
            return Field(NOTHING)
        if op == 0x8C:
            size = self.data[self.at + 1]
            place = self.at + 2
            self.free.append((place, size))
            self.at = place + size + 1
            self.puts += 1
            return Field(TEXT, place, size, self.puts - 1) if self.data[self.at - 1] == 0x94 else None
        before = self.at
        number_of = self._get()
        if number_of is None:
            return None
        if self.data[self.at] in (*_INTS, 0x8A, ord("("), ord(")")):
            return self._size()
        width = self.at - before - 1
        self.free.append((before + 1, width))
        return Field(REFERENCE, before + 1, width)

    def _size(self) -> Field | None:
        dims: list[tuple[int, int]] = []
        if self.data[self.at] == ord(")"):
            self.at += 1
        else:
            marked = self.data[self.at] == ord("(")
            self.at += marked
            while (extent := self._int()) is not None:
                dims.append(extent)
            close = b"t" if marked else bytes([0x84 + len(dims)])
            if not dims or marked == (len(dims) <= 3) or self.data[self.at : self.at + 2] != close + b"\x94":
                return None
            self.at += 2
            self.puts += 1
        if self.data[self.at : self.at + 4] != b"\x85\x94R\x94" or len(dims) > MAX_DIMS:
            return None
        self.at += 4
        self.puts += 2
        return Field(SIZE, 0, len(dims), self.puts - 1, tuple(dims))


@dataclass
class Slot:
    """The values under one key of many records.

    Attributes:
        kind: What each value is: NUMBER, TEXT, SIZE, REFERENCE or NOTHING.
        value: The number; a text's first byte; a reference's memo number; a size's number of dims.
        length: A text's length in bytes.
        memo: The memo number of a text or size, counted from the record's first.
        dims: A size's extents, (records, most dims).
    """

    kind: npt.NDArray[np.int8]
    value: Int64s
    length: npt.NDArray[np.int16]
    memo: npt.NDArray[np.int16]
    dims: Int64s

    def take(self, rows: Any) -> Slot:
        """Some of the values."""
        return Slot(self.kind[rows], self.value[rows], self.length[rows], self.memo[rows], self.dims[rows])


@dataclass
class Rows:
    """Records of one class with one set of keys, in the order of the file.

    Attributes:
        order: Which of all records each is.
        run: The run that each is in: records that follow each other without a gap.
        before: Memo numbers that the records before it in its run use up.
        slots: The values, key by key.
    """

    order: Int64s
    run: Int64s
    before: Int64s
    slots: list[Slot]

    def take(self, rows: Any) -> Rows:
        """Some of the records."""
        return Rows(self.order[rows], self.run[rows], self.before[rows], [slot.take(rows) for slot in self.slots])


@dataclass
class Found:
    """All records of a pickle.

    Attributes:
        rows: Class and keys (memo numbers) to the records.
        start, end, puts, length: Per run: its byte range, the memo numbers it uses up, its number of records.
    """

    rows: dict[tuple[int, tuple[int, ...]], Rows]
    start: Int64s
    end: Int64s
    puts: Int64s
    length: Int64s


@dataclass
class _Block:
    """One block's records while they are read."""

    start: Int64s
    end: Int64s
    puts: Int64s
    role: Int64s
    parts: list[tuple[Layout, Int64s]] = field(default_factory=list)
    kinds: dict[tuple[int, tuple[int, ...]], tuple[Int64s, list[Slot]]] = field(default_factory=dict)


class Scanner:
    """Array operations over a pickle's bytes, which must have :data:`PAD_BYTES` bytes of anything after their end."""

    def __init__(self, data: memoryview) -> None:
        self.size, self._data = len(data) - PAD_BYTES, data
        self.bytes = np.frombuffer(data, dtype=np.uint8)
        self._views = {
            1: self.bytes,
            2: np.ndarray((len(data) - 1,), "<u2", data, strides=(1,)),
            4: np.ndarray((len(data) - 3,), "<u4", data, strides=(1,)),
            8: np.ndarray((len(data) - 7,), "<u8", data, strides=(1,)),
        }
        self.u64 = self._views[8]
        self._layouts: dict[tuple[int, int], list[Layout]] = {}

    def find(self) -> Found:
        """Take all records apart, in blocks that bound the memory of the temporary arrays."""
        parts: dict[tuple[int, tuple[int, ...]], list[Rows]] = {}
        runs: list[tuple[Int64s, Int64s, Int64s, Int64s]] = []
        order, last_end, num_runs, used = 0, -1, 0, 0
        for block in self._blocks():
            joins = int(block.start[0]) == last_end
            gaps = np.flatnonzero(block.start[1:] != block.end[:-1]) + 1
            first = np.concatenate([[0], gaps])
            run = np.zeros(len(block.start), dtype=np.int64)
            run[gaps] = 1
            run = np.cumsum(run) + num_runs - joins
            total = np.concatenate([[0], np.cumsum(block.puts)])
            base = total[first]
            if joins:
                base[0] -= used
            before = total[:-1] - np.repeat(base, np.diff(np.concatenate([first, [len(run)]])))
            for kind, (rows, slots) in block.kinds.items():
                parts.setdefault(kind, []).append(Rows(rows + order, run[rows], before[rows], slots))
            last = np.concatenate([gaps, [len(run)]]) - 1
            runs.append((block.start[first], block.end[last], total[last + 1] - total[first], last - first + 1))
            if joins:
                _join(runs)
            num_runs, last_end = int(run[-1]) + 1, int(block.end[-1])
            used, order = int(before[-1] + block.puts[-1]), order + len(run)
        columns = [np.concatenate([part[index] for part in runs]) if runs else np.zeros(0, dtype=np.int64) for index in range(4)]
        # One kind at a time gives its parts back, so the peak is one kind above the whole.
        return Found({key: _concatenated(parts.pop(key)) for key in list(parts)}, *columns)

    def _blocks(self) -> Iterator[_Block]:
        """The blocks with any records, in order; read by threads, since array operations run beside each other."""
        ranges = [(low, min(low + _BLOCK, self.size)) for low in range(0, self.size, _BLOCK)]
        with ThreadPoolExecutor(min(_THREADS, len(ranges)), thread_name_prefix="labkit-index") as pool:
            for block in pool.map(self._block, ranges):
                if len(block.start):
                    yield block

    def _sort_out(self, block: _Block) -> _Block:
        by_kind: dict[tuple[int, tuple[int, ...]], list[tuple[Layout, Int64s]]] = {}
        for layout, rows in block.parts:
            by_kind.setdefault((layout.cls, layout.keys), []).append((layout, rows))
        place = np.zeros(len(block.start), dtype=np.int64)
        for kind, found in by_kind.items():
            rows = np.sort(np.concatenate([some for _, some in found])) if len(found) > 1 else found[0][1]
            place[rows] = np.arange(len(rows))
            slots = [
                self._slot([(layout.fields[index], some, place[some]) for layout, some in found], block.start, len(rows))
                for index in range(len(kind[1]))
            ]
            block.kinds[kind] = rows, slots
        block.parts = []
        return block

    def _slot(self, found: list[tuple[Field, Int64s, Int64s]], start: Int64s, count: int) -> Slot:
        most = max(len(value.dims) for value, _, _ in found)
        slot = Slot(
            np.zeros(count, np.int8), np.zeros(count, np.int64), np.zeros(count, np.int16), np.zeros(count, np.int16),
            np.zeros((count, most), np.int64),
        )  # fmt: skip
        for value, some, at in found:
            slot.kind[at], slot.memo[at] = value.kind, value.memo
            if value.kind in (NUMBER, REFERENCE):
                slot.value[at] = self._number(start[some] + value.at, value.width, signed=value.kind == NUMBER)
            elif value.kind == TEXT:
                slot.value[at], slot.length[at] = start[some] + value.at, value.width
            elif value.kind == SIZE:
                slot.value[at] = len(value.dims)
                for index, (place, width) in enumerate(value.dims):
                    slot.dims[at, index] = self._number(start[some] + place, width, signed=True)
        return slot

    def _number(self, at: Int64s, width: int, *, signed: bool) -> Int64s:
        if width in (1, 2):
            return self._views[width][at].astype(np.int64)
        if width == 4:
            found = self._views[4][at]
            return found.view(np.int32).astype(np.int64) if signed else found.astype(np.int64)
        shift = np.int64(64 - 8 * width)
        return (self.u64[at].view(np.int64) << shift) >> shift

    def _block(self, where: tuple[int, int]) -> _Block:
        low, high = where
        # A key and its place stay together: they belong to the block in which the key begins.
        at = np.flatnonzero(self.bytes[low : min(high + 2 * _MAX_RECORD, self.size)] == 0x81).astype(np.int64) + low
        at = at[at >= 6]
        words = self.u64[at - 1] & np.uint64(0xFFFFFFFFFFFF)
        at = at[words == np.uint64(int.from_bytes(_HEAD, "little"))]
        long = self.bytes[at - 6] == ord("j")
        good = long | (self.bytes[at - 3] == ord("h"))
        at, long = at[good], long[good]
        start = np.where(long, at - 6, at - 3)
        cls = np.where(long, self._views[4][at - 5], self.bytes[at - 2]).astype(np.int64)
        block = _Block(start, np.zeros(len(at), np.int64), np.zeros(len(at), np.int64), np.zeros(len(at), np.int64))
        step = np.minimum(np.diff(start, append=start[-1:] + _MAX_RECORD), _MAX_RECORD)
        # Records of one class and length mostly have one layout.
        left = np.arange(len(at))
        while len(left):
            same = cls[left] == cls[left[0]]
            rows, left = left[same], left[~same]
            lengths = np.bincount(step[rows], minlength=1)
            for length in np.flatnonzero(lengths).tolist():
                self._group(block, rows[step[rows] == length], (int(cls[rows[0]]), length))
        block = _only(block, block.end > 0)
        return self._sort_out(_only(block, _pairs(block, high)))

    def _group(self, block: _Block, rows: Int64s, kind: tuple[int, int]) -> None:
        known = self._layouts.setdefault(kind, [])
        for layout in list(known):
            rows = self._match(block, rows, layout)
        while len(rows) and len(known) < _MAX_LAYOUTS:
            at = int(block.start[rows[0]])
            found = _Parser(bytes(self._data[at : at + PAD_BYTES])).layout()
            if found is None:
                rows = rows[1:] if len(rows) < _MAX_LAYOUTS else rows[:0]  # another form: it stays in the rest
                continue
            known.append(found)
            rows = self._match(block, rows, found)

    def _match(self, block: _Block, rows: Int64s, layout: Layout) -> Int64s:
        """Note the rows that have a layout; returns the others."""
        if not len(rows):
            return rows
        start = block.start[rows]
        same = np.ones(len(rows), dtype=bool)
        for at, mask, value in layout.words:
            if mask:
                same &= (self.u64[start + at] & np.uint64(mask)) == np.uint64(value)
        here = rows[same]
        if len(here):
            block.end[here], block.puts[here] = start[same] + layout.length, layout.puts
            block.role[here] = layout.role
            block.parts.append((layout, here))
        return rows[~same]


def _only(block: _Block, good: Any) -> _Block:
    """The block without some of its records."""
    if good.all():
        return block
    number = np.cumsum(good) - 1
    parts = [(layout, number[rows[good[rows]]]) for layout, rows in block.parts]
    return _Block(block.start[good], block.end[good], block.puts[good], block.role[good], parts)


def _pairs(block: _Block, high: int) -> Any:
    """Which records belong to this block: chunks and pairs of key and place that begin in it; nothing without its partner."""
    role, inside = block.role, block.start < high
    follows = np.append(block.start[1:] == block.end[:-1], False)
    paired = (role == KEY) & follows & (np.append(role[1:], -1) == PLACE) & inside
    return ((role == CHUNK) & inside) | paired | np.insert(paired[:-1], 0, False) if len(role) else inside


def _join(runs: list[tuple[Int64s, Int64s, Int64s, Int64s]]) -> None:
    """The last block's first run goes on where the block before ended."""
    (_, end, puts, length), (more_start, more_end, more_puts, more_length) = runs[-2:]
    end[-1], puts[-1], length[-1] = more_end[0], puts[-1] + more_puts[0], length[-1] + more_length[0]
    runs[-1] = (more_start[1:], more_end[1:], more_puts[1:], more_length[1:])
    if not len(runs[-1][0]):
        runs.pop()


def _concatenated(parts: list[Rows]) -> Rows:
    slots = []
    for index in range(len(parts[0].slots)):
        some = [part.slots[index] for part in parts]
        most = max(slot.dims.shape[1] for slot in some)
        dims = np.concatenate([np.pad(slot.dims, ((0, 0), (0, most - slot.dims.shape[1]))) for slot in some])
        kind, value, length, memo = (
            np.concatenate([getattr(slot, name) for slot in some]) for name in ("kind", "value", "length", "memo")
        )
        slots.append(Slot(kind, value, length, memo, dims))
    order, run, before = (np.concatenate([getattr(part, name) for part in parts]) for name in ("order", "run", "before"))
    return Rows(order, run, before, slots)

"""Read the records that make up most of a large ``.metadata`` by array operations, block by block.

Where an object may begin is told by its first bytes. What begins there and has a known layout is copied into the rows of a
matrix: the fixed bytes are compared eight at a time, and the values are columns. Tensors of one shape and sharding have the
same list of chunks, byte for byte, so most lists equal one that was read before and are not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from labkit.checkpoint.bulk_names import Names
from labkit.checkpoint.model import Int64s
from labkit.checkpoint.record_layout import CHUNK, MAX_DIMS, MAX_RECORD, PAIR, Layout, Rows, Value, layout_of

NAME_PUT = 2  # a pair memoizes its key, the key's state, then its name
_BLOCK = 1 << 22
_CACHED = 1 << 16  # words that a processor's cache holds while they are compared several times
_MAX_LAYOUTS = 16
_MAX_LISTS = 256
_LIST_HEAD = 64
# What follows each object's class is seven bytes. Four of them are an aligned word, which tells how many are before it.
_HEADS = [b")\x81\x94}", b"\x81\x94}\x94", b"\x94}\x94(", b"}\x94(h", b"}\x94(j"]
_WORDS = [int.from_bytes(word, "little") for word in _HEADS]
_BEFORE = np.zeros(256, np.int64)
_BEFORE[[word[0] for word in _HEADS]] = [0, 1, 2, 3, 3]


class OtherFormError(Exception):
    """The pickle is not of the form that is read by array operations."""


@dataclass(eq=False, slots=True)
class Run:
    """Records of one form and number of dims that follow each other without a gap.

    Attributes:
        form: CHUNK or PAIR.
        dims: The number of dims.
        count: The number of records.
        puts: The memo numbers that they use up.
        boxes: Of chunks, offsets and sizes, (chunks, dims) each, in parts.
        first: The memo number of the first that they memoize; set when the rest is read.
    """

    form: int
    dims: int
    count: int
    puts: int
    boxes: list[tuple[Int64s, Int64s]] = field(default_factory=list)
    first: int = 0


@dataclass
class _Span:
    """The bytes of a block from ``begin`` to ``end``: one run, or a part of one that blocks divide.

    Attributes:
        part: What is there.
        again: Whether it equals a list that was read before.
        run: The run that it is of.
        before: Memo numbers that the run uses up before it.
    """

    begin: int
    end: int
    part: Run
    again: bool = False
    run: Run | None = None
    before: int = 0


@dataclass
class Pairs:
    """Keys with places, in any order.

    Attributes:
        spans: The spans that they are in.
        offsets: (pairs, most dims).
        span: For each pair the position in ``spans``.
        memo: Memo numbers that the span uses up before the first that the pair itself memoizes.
        puts: Memo numbers that the pair uses up: :data:`NAME_PUT` after the first is its own name, the last its own file.
        name, file: A number of :attr:`BulkRecords.names` or ``files``, or -1 less the memo number of a text.
        index, start, length: The numbers.
        dims: The number of dims.
    """

    spans: list[_Span]
    offsets: Int64s
    span: Int64s
    memo: Int64s
    puts: Int64s
    name: Int64s
    file: Int64s
    index: Int64s
    start: Int64s
    length: Int64s
    dims: Int64s

    def before(self) -> Int64s:
        """The memo number of the first that each pair memoizes, once the runs have theirs."""
        first = np.array([0 if span.run is None else span.run.first + span.before for span in self.spans], dtype=np.int64)
        return first[self.span] + self.memo


_Found = tuple[Layout, Int64s, Rows]


class BulkRecords:
    """All records of a pickle that have one of the two forms.

    Args:
        fill: Fills memory with the pickle's next bytes, wholly but for the last time; returns how many.
        most_rest: The most bytes that may be no such records.

    Attributes:
        runs: Where they are, in order.
        gaps: The bytes before, between and after the runs.
        pairs: The pairs, in parts.
        names, files: The texts that pairs bring along.
        gets: Form and memo numbers of the classes and keys of all layouts.

    Raises:
        OtherFormError: More than ``most_rest`` bytes are no such records, or one lies inside another.
    """

    def __init__(self, fill: Callable[[memoryview], int], most_rest: int) -> None:
        self.runs: list[Run] = []
        self.gaps: list[bytes] = []
        self.pairs: list[Pairs] = []
        self.names, self.files = Names(), Names()
        self.gets: set[tuple[int, tuple[int, ...]]] = set()
        self._left = most_rest
        self._gap: list[bytes] = []
        self._layouts: dict[tuple[int, int], list[Layout | None]] = {}
        self._lists: dict[bytes, tuple[bytes, Run]] = {}
        memory = bytearray(_BLOCK + MAX_RECORD)
        self._body = np.frombuffer(memory, np.uint8)
        self._words = np.frombuffer(memory, "<u4", len(memory) // 4)
        self._classes = np.ndarray(len(memory) - 3, "<u4", memory, 0, (1,))
        end, more = 0, True
        while more:
            end += fill(memoryview(memory)[end:_BLOCK])
            more = end == _BLOCK
            self._body[end : end + MAX_RECORD] = 0
            # The last records may be cut off: they belong to the next block.
            done = self._block(end, end - 2 * MAX_RECORD if more else end)
            self._body[: end - done] = self._body[done:end].copy()
            end -= done
        self.gaps.append(b"".join(self._gap))

    def _block(self, end: int, limit: int) -> int:
        """Read the records that begin before ``limit``; returns where the next block begins."""
        start = self._starts(end)
        step = np.minimum(np.diff(start, append=[end + MAX_RECORD] * 2), MAX_RECORD).astype(np.uint16)
        steps = step[:-1] * np.uint16(1021) + step[1:]
        start = start[: np.searchsorted(start, limit)]
        spans = list(self._known_lists(start, end))
        new = np.ones(len(start), dtype=bool)
        for span in spans:
            new[slice(*np.searchsorted(start, [span.begin, span.end]))] = False
        start, steps = start[new], steps[: len(new)][new]
        found = list(self._records(start, steps))
        if found:
            is_record = np.zeros(len(start), dtype=bool)
            for _, rows, _ in found:
                is_record[rows] = True
            place = np.cumsum(is_record) - 1
            spans += self._spans(start[is_record], [(layout, place[rows], matrix) for layout, rows, matrix in found])
        done = self._note(sorted(spans, key=lambda span: span.begin), limit)
        self._note_gap(done, limit)
        return max(done, limit)

    def _starts(self, end: int) -> Int64s:
        """Where objects may begin."""
        hit = np.zeros(-(-end // 4), dtype=bool)
        for begin in range(0, len(hit), _CACHED):
            words, here = self._words[begin : begin + _CACHED], hit[begin : begin + _CACHED]
            for word in _WORDS:
                here |= words[: len(here)] == word
        at = np.flatnonzero(hit) * 4
        head = at - _BEFORE[self._body[at]]
        head = head[head >= 2]
        # The class is a reference of one byte or of four.
        return head - np.where((self._body[head - 5] == ord("j")) & (head >= 5), 5, 2)

    def _known_lists(self, start: Int64s, end: int) -> Iterator[_Span]:
        """The lists of chunks in a block that equal one that was read before."""
        at = 0
        for begin in start[self._body[start - 1] == ord("(")].tolist():
            data, run = self._lists.get(self._body[begin : begin + _LIST_HEAD].tobytes(), (b"", None))
            close = begin + len(data)
            if run is not None and at <= begin and close <= end and self._body[begin:close].tobytes() == data:
                yield _Span(begin, close, run, again=True)
                at = close

    def _records(self, start: Int64s, steps: npt.NDArray[np.uint16]) -> Iterator[_Found]:
        """Layouts and the records that have them, as positions in ``start`` and as rows."""
        # Records of one class whose neighbours are as far away mostly have one layout.
        classes = self._classes[start + 1]
        key = classes.astype(np.uint16) * np.uint16(40503) + steps
        order = np.argsort(key, kind="stable")
        changes = (np.diff(key[order]) != 0) | (np.diff(classes[order]) != 0)
        for rows in np.split(order, np.flatnonzero(changes) + 1) if len(order) else []:
            known = self._layouts.setdefault((int(classes[rows[0]]), int(key[rows[0]])), [])
            yield from self._records_of(rows, start, known)

    def _records_of(self, rows: Int64s, start: Int64s, known: list[Layout | None]) -> Iterator[_Found]:
        for number in range(_MAX_LAYOUTS):
            if not len(rows):
                return
            if number == len(known):
                begin = int(start[rows[0]])
                known.append(layout_of(self._body[begin : begin + MAX_RECORD].tobytes()))
                if known[number] is None:
                    rows = rows[1:]
            layout = known[number]
            if layout is None:
                continue
            self.gets.add((layout.form, layout.gets))
            width = len(layout.mask) * 8
            records = np.ndarray(_BLOCK, f"V{width}", self._body, 0, (1,))
            matrix = records[start[rows]].view(np.uint8).reshape(-1, width)
            same = layout.fits(matrix)
            if same.all():
                yield layout, rows, matrix
                return
            if same.any():
                yield layout, rows[same], matrix[same]
                rows = rows[~same]

    def _spans(self, start: Int64s, found: list[_Found]) -> list[_Span]:
        """The runs of the records that were found in a block, with the chunks; pairs are noted."""
        layouts = [layout for layout, _, _ in found]
        which = np.zeros(len(start), np.int64)
        for number, (_, rows, _) in enumerate(found):
            which[rows] = number
        end = start + np.array([layout.length for layout in layouts])[which]
        puts = np.array([layout.puts for layout in layouts])[which]
        kind = np.array([layout.form * (MAX_DIMS + 1) + layout.dims for layout in layouts])[which]
        first = np.flatnonzero(np.append(True, (start[1:] != end[:-1]) | (kind[1:] != kind[:-1])))
        count = np.diff(first, append=len(start))
        if (start[1:] < end[:-1]).any():
            raise OtherFormError  # a record in a text of another
        columns = (start[first], end[first + count - 1], which[first], count, np.add.reduceat(puts, first))
        spans = [
            _Span(begin, close, Run(layouts[layout].form, layouts[layout].dims, *counts))
            for begin, close, layout, *counts in zip(*(column.tolist() for column in columns), strict=True)
        ]
        chunks = [part for part in found if part[0].form == CHUNK]
        if chunks:
            boxes = _boxes(chunks, len(start))
            for row, span in zip(first.tolist(), spans, strict=True):
                offsets, sizes = boxes[:, row : row + span.part.count, : span.part.dims]
                span.part.boxes.append((offsets, sizes))
        pairs = [part for part in found if part[0].form == PAIR]
        if pairs:
            before = np.cumsum(puts) - puts
            self._read_pairs(pairs, spans, np.repeat(np.arange(len(first)), count), before - np.repeat(before[first], count))
        return spans

    def _read_pairs(self, found: list[_Found], spans: list[_Span], span: Int64s, memo: Int64s) -> None:
        count = sum(len(rows) for _, rows, _ in found)
        most = max(layout.dims for layout, _, _ in found)
        made = Pairs(spans, np.zeros((count, most), np.int64), *np.empty((9, count), np.int64))
        begin = 0
        for layout, rows, matrix in found:
            part = slice(begin, begin + len(rows))
            begin = part.stop
            made.span[part], made.memo[part], made.puts[part], made.dims[part] = span[rows], memo[rows], layout.puts, layout.dims
            made.name[part], made.file[part] = _texts(layout.name, matrix, self.names), _texts(layout.file, matrix, self.files)
            made.index[part], *offsets, made.start[part], made.length[part] = (number.of(matrix) for number in layout.numbers)
            for dim, offset in enumerate(offsets):
                made.offsets[part, dim] = offset
        self.pairs.append(made)

    def _note(self, spans: list[_Span], limit: int) -> int:
        """Note a block's runs, and the gaps before them; returns where the last ends."""
        at = 0
        for span in spans:
            if span.begin < at:
                raise OtherFormError
            self._note_gap(at, span.begin)
            at, part = span.end, span.part
            last = self.runs[-1] if self.runs and not self._gap else None
            if last is None or (last.form, last.dims) != (part.form, part.dims):
                self.gaps.append(b"".join(self._gap))
                self._gap.clear()
                last = Run(part.form, part.dims, 0, 0)
                self.runs.append(last)
                if part.form == CHUNK and not span.again and at < limit and self._body[span.begin - 1] == ord("("):
                    self._remember(self._body[span.begin : at].tobytes(), part)
            span.run, span.before = last, last.puts
            last.count, last.puts, last.boxes = last.count + part.count, last.puts + part.puts, last.boxes + part.boxes
        return at

    def _remember(self, data: bytes, part: Run) -> None:
        if len(self._lists) == _MAX_LISTS:
            self._lists.clear()
        self._lists[data[:_LIST_HEAD]] = data, part

    def _note_gap(self, begin: int, end: int) -> None:
        if begin < end:
            self._gap.append(self._body[begin:end].tobytes())
            self._left -= end - begin
            if self._left < 0:
                raise OtherFormError


def _boxes(found: list[_Found], count: int) -> Int64s:
    """Offsets and sizes of chunks: (2, rows of the block, most dims)."""
    boxes = np.zeros((2, count, max(layout.dims for layout, _, _ in found)), np.int64)
    for layout, rows, matrix in found:
        for number, value in enumerate(layout.numbers):
            boxes[number // layout.dims, rows, number % layout.dims] = value.of(matrix)
    return boxes


def _texts(value: Value, matrix: Rows, texts: Names) -> Int64s:
    if value.code == "SHORT_BINUNICODE":
        return texts.numbers(matrix, value.at, value.width)
    return -1 - value.of(matrix).astype(np.int64)

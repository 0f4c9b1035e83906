"""Reading of the records that make up most of a block of a large ``.metadata``, by array operations.

The first bytes show where an object may begin. An object with a known layout is copied into a row of a matrix: the fixed bytes
are compared eight at a time, and the values are columns. Tensors of the same shape and sharding have the same list of chunks,
byte for byte, so most lists equal an earlier one and are not read again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from labkit.checkpoint.formats.large_index.block_source import BACK, Blocks
from labkit.checkpoint.formats.large_index.names import Names
from labkit.checkpoint.formats.large_index.parts import Block, Int64s, OtherFormError, Pairs, Run, Span
from labkit.checkpoint.formats.large_index.record_layout import CHUNK, MAX_DIMS, MAX_RECORD, PAIR, Layout, Rows, Value, layout_of

_CACHED = 1 << 16  # words that stay in a processor's cache while they are compared several times
_MAX_LAYOUTS = 16
_MAX_LISTS = 256
_LIST_HEAD = 64
# Seven bytes follow each object's class. Four of them are an aligned word, which shows how many of the seven precede it.
_HEADS = [b")\x81\x94}", b"\x81\x94}\x94", b"\x94}\x94(", b"}\x94(h", b"}\x94(j"]
_WORDS = [int.from_bytes(word, "little") for word in _HEADS]
_BEFORE = np.zeros(256, np.int64)
_BEFORE[[word[0] for word in _HEADS]] = [0, 1, 2, 3, 3]


_Found = tuple[Layout, Int64s, Rows]


class BlockReader:
    """A reader of blocks, one after the other.

    Args:
        blocks: The source of the blocks.

    Attributes:
        pairs: The pairs, in parts.
        num_spans: Number of numbered spans.
        names, files: The texts that pairs contain.
        gets: Form and memo numbers of the classes and keys of all layouts.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.pairs: list[Pairs] = []
        self.names, self.files = Names(), Names()
        self.gets: set[tuple[int, tuple[int, ...]]] = set()
        self._blocks = blocks
        self._layouts: dict[tuple[int, int], list[Layout | None]] = {}
        self._lists: dict[bytes, tuple[bytes, Run]] = {}
        self.num_spans = 0
        self._memory = blocks.new_memory()
        self._body = np.frombuffer(self._memory, np.uint8)
        self._words = np.frombuffer(self._memory, "<u4", len(self._memory) // 4)
        self._classes = np.ndarray(len(self._memory) - 3, "<u4", self._memory, 0, (1,))

    def read_all(self) -> list[Block]:
        """Read blocks until there are none.

        Raises:
            OtherFormError: Too many bytes are no such records, or one record overlaps another.
        """
        found = []
        while (block := self._blocks.next(self._memory)) is not None:
            found.append(self._read(*block))
        return found

    def _read(self, base: int, limit: int, end: int) -> Block:
        start = self._starts(end)
        step = np.minimum(np.diff(start, append=[end + MAX_RECORD] * 2), MAX_RECORD).astype(np.uint16)
        steps = step[:-1] * np.uint16(1021) + step[1:]
        own = slice(*np.searchsorted(start, [BACK, limit]))
        start, steps = start[own], steps[own]
        spans = list(self._known_lists(start, limit))
        new = np.ones(len(start), dtype=bool)
        for span in spans:
            new[slice(*np.searchsorted(start, [span.begin, span.end]))] = False
        start, steps = start[new], steps[new]
        found = list(self._records(start, steps))
        if found:
            is_record = np.zeros(len(start), dtype=bool)
            for _, rows, _ in found:
                is_record[rows] = True
            place = np.cumsum(is_record) - 1
            made = self._spans(start[is_record], [(layout, place[rows], matrix) for layout, rows, matrix in found])
            for span in made:
                # A list at the end of the block may be cut off, and would match the beginning of each whole list.
                if span.part.form == CHUNK and span.end < limit and self._body[span.begin - 1] == ord("("):
                    self._remember(self._body[span.begin : span.end].tobytes(), span.part)
            spans = sorted(spans + made, key=lambda span: span.begin)
        return Block(base, spans, self._gaps(spans, limit))

    def _starts(self, end: int) -> Int64s:
        """Return the positions at which objects may begin."""
        hit = np.zeros(-(-end // 4), dtype=bool)
        for begin in range(0, len(hit), _CACHED):
            words, here = self._words[begin : begin + _CACHED], hit[begin : begin + _CACHED]
            for word in _WORDS:
                here |= words[: len(here)] == word
        at = np.flatnonzero(hit) * 4
        head = at - _BEFORE[self._body[at]]
        # The class is a reference of one byte or of four bytes.
        return head - np.where(self._body[head - 5] == ord("j"), 5, 2)

    def _known_lists(self, start: Int64s, limit: int) -> Iterator[Span]:
        """Yield the lists of chunks in a block that equal an earlier list."""
        at = 0
        for begin in start[self._body[start - 1] == ord("(")].tolist():
            data, run = self._lists.get(self._body[begin : begin + _LIST_HEAD].tobytes(), (b"", None))
            close = begin + len(data)
            if run is not None and at <= begin and close <= limit and self._body[begin:close].tobytes() == data:
                yield Span(begin, close, run)
                at = close

    def _remember(self, data: bytes, part: Run) -> None:
        if len(self._lists) == _MAX_LISTS:
            self._lists.clear()
        self._lists[data[:_LIST_HEAD]] = data, part

    def _records(self, start: Int64s, steps: npt.NDArray[np.uint16]) -> Iterator[_Found]:
        """Yield layouts and the records that have them, as indices into ``start`` and as rows."""
        # Records of the same class and with the same distances to their neighbours mostly have the same layout.
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
            records = np.ndarray(len(self._memory) - MAX_RECORD, f"V{width}", self._memory, 0, (1,))
            matrix = records[start[rows]].view(np.uint8).reshape(-1, width)
            same = layout.fits(matrix)
            if same.all():
                yield layout, rows, matrix
                return
            if same.any():
                yield layout, rows[same], matrix[same]
                rows = rows[~same]

    def _spans(self, start: Int64s, found: list[_Found]) -> list[Span]:
        """Return the runs of the records found in a block, with the chunks; note the pairs."""
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
            raise OtherFormError  # a record inside a text of another
        columns = (start[first], end[first + count - 1], which[first], count, np.add.reduceat(puts, first))
        spans = [
            Span(begin, close, Run(layouts[layout].form, layouts[layout].dims, *counts))
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
            self._note_pairs(pairs, spans, np.repeat(np.arange(len(first)), count), before - np.repeat(before[first], count))
        return spans

    def _note_pairs(self, found: list[_Found], spans: list[Span], span: Int64s, memo: Int64s) -> None:
        count = sum(len(rows) for _, rows, _ in found)
        most = max(layout.dims for layout, _, _ in found)
        made = Pairs(
            np.zeros((count, most), np.int64), *np.empty((2, count), np.int32), *np.empty((2, count), np.uint8),
            *np.empty((5, count), np.int64),
        )  # fmt: skip
        for number, item in enumerate(spans, self.num_spans):
            item.number = number
        span, self.num_spans = span + self.num_spans, self.num_spans + len(spans)
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

    def _gaps(self, spans: list[Span], limit: int) -> list[bytes]:
        begins, ends = [span.begin for span in spans], [span.end for span in spans]
        gaps = [self._body[begin:end].tobytes() for begin, end in zip([BACK, *ends], [*begins, limit], strict=True)]
        self._blocks.note_rest(sum(map(len, gaps)))
        return gaps


def _boxes(found: list[_Found], count: int) -> Int64s:
    """Return offsets and sizes of chunks: (2, rows of the block, most dims)."""
    boxes = np.zeros((2, count, max(layout.dims for layout, _, _ in found)), np.int64)
    for layout, rows, matrix in found:
        for number, value in enumerate(layout.numbers):
            boxes[number // layout.dims, rows, number % layout.dims] = value.of(matrix)
    return boxes


def _texts(value: Value, matrix: Rows, texts: Names) -> Int64s:
    if value.code == "SHORT_BINUNICODE":
        return texts.numbers(matrix, value.at, value.width)
    return -1 - value.of(matrix).astype(np.int64)

"""What is found in the blocks of a large ``.metadata``."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from labkit.checkpoint.model import Int64s


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
class Span:
    """The bytes of a block from ``begin`` to ``end``: one run, or a part of one that blocks divide.

    Attributes:
        part: What is there.
        run: The run that it is of; set when the blocks are joined.
        before: Memo numbers that the run uses up before it; set with it.
    """

    begin: int
    end: int
    part: Run
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
        puts: Memo numbers that the pair uses up: the third is its own name's, the last its own file's.
        name, file: A number of the reader's ``names`` or ``files``, or -1 less the memo number of a text.
        index, start, length: The numbers.
        dims: The number of dims.
    """

    spans: list[Span]
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


@dataclass
class Block:
    """What was found in a block.

    Attributes:
        base: Where in the pickle the first byte of the reader's memory is.
        spans: The runs that begin in it, in order.
        gaps: The bytes before each span and after the last one. The first may begin with the end of the record before it.
    """

    base: int
    spans: list[Span]
    gaps: list[bytes]

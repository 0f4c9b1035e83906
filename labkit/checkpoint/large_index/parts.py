"""What is found in the blocks of a large ``.metadata``. Needs no torch: it also passes between processes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class OtherFormError(Exception):
    """The pickle is not of the form that is read by array operations."""


# What a damaged or hostile pickle makes the array operations raise.
OTHER_FORM = (
    OtherFormError, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, TypeError, ValueError, struct.error,
)  # fmt: skip


def require(condition: bool) -> None:
    """Raise :class:`OtherFormError` where something is not as expected."""
    if not condition:
        raise OtherFormError


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


@dataclass(slots=True)
class Span:
    """The bytes of a block from ``begin`` to ``end``: one run, or a part of one that blocks divide.

    Attributes:
        part: What is there.
        number: Which of its reader's spans it is, from 0 on; -1 for a list of chunks that was seen before.
        run: The run that it is of; set when the blocks are joined.
        before: Memo numbers that the run uses up before it; set with it.
    """

    begin: int
    end: int
    part: Run
    number: int = -1
    run: Run | None = None
    before: int = 0


@dataclass
class Pairs:
    """Keys with places, in any order.

    Attributes:
        offsets: (pairs, most dims).
        span: For each pair the number of the span that it is in.
        memo: Memo numbers that the span uses up before the first that the pair itself memoizes.
        puts: Memo numbers that the pair uses up: the third is its own name's, the last its own file's.
        dims: The number of dims.
        name, file: A number of the reader's ``names`` or ``files``, or -1 less the memo number of a text.
        index, start, length: The numbers.
    """

    offsets: Int64s
    span: npt.NDArray[np.int32]
    memo: npt.NDArray[np.int32]
    puts: npt.NDArray[np.uint8]
    dims: npt.NDArray[np.uint8]
    name: Int64s
    file: Int64s
    index: Int64s
    start: Int64s
    length: Int64s


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


@dataclass
class Part:
    """What one reader has found in its blocks, but for the pairs, which it keeps.

    Attributes:
        blocks: Its blocks.
        num_spans: How many spans have a number.
        names, files: The texts that its pairs bring along, in UTF-8.
        name_gets, file_gets: The memo numbers of the texts that its pairs refer to.
        gets: Form and memo numbers of the classes and keys of all layouts.
    """

    blocks: list[Block]
    num_spans: int
    names: list[bytes]
    files: list[bytes]
    name_gets: Int64s
    file_gets: Int64s
    gets: set[tuple[int, tuple[int, ...]]]

    def firsts(self) -> Int64s:
        """For each span by number, the memo number of the first that it memoizes, once the runs have theirs."""
        result = np.zeros(self.num_spans, np.int64)
        for block in self.blocks:
            for span in block.spans:
                if span.number >= 0 and span.run is not None:
                    result[span.number] = span.run.first + span.before
        return result


@dataclass
class Placing:
    """What a reader needs to know to place its pairs.

    Attributes:
        firsts: As :meth:`Part.firsts` gives it.
        tensors, files: The numbers of its own names and files.
        name_gets, file_gets: Memo numbers, in order, and the numbers of the texts that they stand for.
        begins, ends, num_dims: By tensor: the range of its chunks in the columns, and its dims.
        shape: Rows and most dims of the chunks.
    """

    firsts: Int64s
    tensors: Int64s
    files: Int64s
    name_gets: tuple[Int64s, Int64s]
    file_gets: tuple[Int64s, Int64s]
    begins: Int64s
    ends: Int64s
    num_dims: Int64s
    shape: tuple[int, int]

"""Findings in the blocks of a large ``.metadata``. Needs no torch, because they are also passed between processes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class OtherFormError(Exception):
    """The pickle does not have the form that array operations can read."""


# Errors that the array operations raise on a damaged or hostile pickle.
OTHER_FORM = (
    OtherFormError, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, TypeError, ValueError, struct.error,
)  # fmt: skip


def require(condition: bool) -> None:
    """Raise :class:`OtherFormError` if a condition does not hold."""
    if not condition:
        raise OtherFormError


@dataclass(eq=False, slots=True)
class Run:
    """Records of the same form and number of dims that follow each other without a gap.

    Attributes:
        form: CHUNK or PAIR.
        dims: The number of dims.
        count: The number of records.
        puts: The number of memo numbers that they use.
        boxes: Offsets and sizes of chunks, (chunks, dims) each, in parts.
        first: The first memo number that they use; set when the rest is read.
    """

    form: int
    dims: int
    count: int
    puts: int
    boxes: list[tuple[Int64s, Int64s]] = field(default_factory=list)
    first: int = 0


@dataclass(slots=True)
class Span:
    """The bytes of a block from ``begin`` to ``end``: one run, or a part of a run that extends over several blocks.

    Attributes:
        part: The records in it.
        number: Its index among its reader's spans, from 0; -1 for a list of chunks that was seen before.
        run: The run that it belongs to; set when the blocks are joined.
        before: The number of memo numbers that the run uses before this span; set together with ``run``.
    """

    begin: int
    end: int
    part: Run
    number: int = -1
    run: Run | None = None
    before: int = 0


@dataclass
class Pairs:
    """Keys with the places of their bytes, in any order.

    Attributes:
        offsets: (pairs, most dims).
        span: For each pair, the number of its span.
        memo: The number of memo numbers that the span uses before this pair.
        puts: The number of memo numbers that the pair uses; its own name takes the third, its own file the last.
        dims: The number of dims.
        name, file: A number in the reader's ``names`` or ``files``, or -1 minus the memo number of a text.
        index, start, length: The pair's numbers.
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
    """Findings in one block.

    Attributes:
        base: The position in the pickle of the first byte of the reader's memory.
        spans: The runs that begin in the block, in order.
        gaps: The bytes before each span and after the last one. The first may begin with the end of the previous record.
    """

    base: int
    spans: list[Span]
    gaps: list[bytes]


@dataclass
class Part:
    """Findings of one reader in its blocks, without the pairs, which it keeps.

    Attributes:
        blocks: Its blocks.
        num_spans: Number of numbered spans.
        names, files: The texts that its pairs contain, in UTF-8.
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
        """Return, for each numbered span, the first memo number that it uses; call it once the runs have theirs."""
        result = np.zeros(self.num_spans, np.int64)
        for block in self.blocks:
            for span in block.spans:
                if span.number >= 0 and span.run is not None:
                    result[span.number] = span.run.first + span.before
        return result


@dataclass
class Placing:
    """Information that a reader needs to place its pairs.

    Attributes:
        firsts: As :meth:`Part.firsts` returns it.
        tensors, files: The numbers of its own names and files.
        name_gets, file_gets: Memo numbers, in order, and the numbers of the texts that they refer to.
        begins, ends, num_dims: By tensor: the range of its chunks in the columns, and its number of dims.
        shape: Number of rows and most dims of the chunks.
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

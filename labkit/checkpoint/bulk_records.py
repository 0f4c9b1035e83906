"""Take the records that make up most of a large ``.metadata`` out of it, several blocks at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from labkit.checkpoint.block_reader import BACK, BlockReader, Blocks
from labkit.checkpoint.bulk_parts import Block, OtherFormError, Run
from labkit.machine import usable_cores

T = TypeVar("T")
# Array operations let other threads run, and what lies between them does not. Measured on two cores only.
MOST_THREADS = 4


class BulkRecords:
    """All records of a pickle that have one of the two forms.

    Args:
        fill: Fills memory with the pickle's next bytes, wholly but for the last time; returns how many.
        most_rest: The most bytes that may be no such records.

    Attributes:
        runs: Where they are, in order.
        gaps: The bytes before, between and after the runs.
        readers: What was read, by the thread that did; each has the pairs and texts of its blocks.

    Raises:
        OtherFormError: More than ``most_rest`` bytes are no such records, or one lies inside another.
    """

    def __init__(self, fill: Callable[[memoryview], int], most_rest: int) -> None:
        self.runs: list[Run] = []
        self.gaps: list[bytes] = []
        blocks = Blocks(fill, most_rest)
        self.readers = [BlockReader(blocks) for _ in range(min(usable_cores(), MOST_THREADS))]
        parts = self.each_reader(BlockReader.read_all)
        self._join(sorted((block for part in parts for block in part), key=lambda block: block.base))

    def each_reader(self, work: Callable[[BlockReader], T]) -> list[T]:
        """Work on what each reader has read, all at the same time."""
        with ThreadPoolExecutor(len(self.readers), thread_name_prefix="labkit-metadata") as threads:
            return list(threads.map(work, self.readers))

    def _join(self, blocks: list[Block]) -> None:
        """Make the runs of the blocks' spans."""
        gap: list[bytes] = []
        reach = 0  # the end of the last record
        for block in blocks:
            at = block.base + BACK
            for span, before in zip(block.spans, block.gaps, strict=False):
                if block.base + span.begin < reach:
                    raise OtherFormError
                gap.append(before[max(reach - at, 0) :])
                reach = at = block.base + span.end
                last = None if any(gap) or not self.runs else self.runs[-1]
                if last is None or (last.form, last.dims) != (span.part.form, span.part.dims):
                    self.gaps.append(b"".join(gap))
                    last = Run(span.part.form, span.part.dims, 0, 0)
                    self.runs.append(last)
                gap.clear()
                span.run, span.before = last, last.puts
                last.count, last.puts = last.count + span.part.count, last.puts + span.part.puts
                last.boxes += span.part.boxes
            gap.append(block.gaps[-1][max(reach - at, 0) :])
        self.gaps.append(b"".join(gap))

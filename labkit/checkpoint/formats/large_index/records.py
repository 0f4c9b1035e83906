"""Joining of what the readers of a large ``.metadata`` have found in its blocks."""

from __future__ import annotations

from labkit.checkpoint.formats.large_index.block_source import BACK
from labkit.checkpoint.formats.large_index.parts import Block, Part, Run, require


class BulkRecords:
    """All records of a pickle that have one of the two forms.

    Args:
        parts: The findings of each reader.
        most_rest: The most bytes that may be outside such records.

    Attributes:
        parts: The same.
        runs: The runs of records, in order.
        gaps: The bytes before, between and after the runs.

    Raises:
        OtherFormError: More than ``most_rest`` bytes are outside such records, or one record overlaps another.
    """

    def __init__(self, parts: list[Part], most_rest: int) -> None:
        self.parts = parts
        self.runs: list[Run] = []
        self.gaps: list[bytes] = []
        self._join(sorted((block for part in parts for block in part.blocks), key=lambda block: block.base))
        require(sum(map(len, self.gaps)) <= most_rest)

    def _join(self, blocks: list[Block]) -> None:
        """Join the blocks' spans into runs."""
        gap: list[bytes] = []
        reach = 0  # the end of the last record
        for block in blocks:
            at = block.base + BACK
            for span, before in zip(block.spans, block.gaps, strict=False):
                require(block.base + span.begin >= reach)
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

"""Distribution of the blocks of a large ``.metadata``, in order, to readers in several processes."""

from __future__ import annotations

import os
import struct

from labkit.checkpoint.formats.large_index.parts import OtherFormError, require
from labkit.checkpoint.formats.large_index.record_layout import MAX_RECORD

BACK = 8  # bytes of the previous block that are kept before a block
AFTER = 2 * MAX_RECORD  # bytes of the next block that are kept after a block, because records may continue there
_MAGIC_BYTES = 2
# The next block: its offset in the file, the bytes left in the frame there, its position in the pickle, and whether it exists.
_TURN = struct.Struct("<QQq?")
FIRST_TURN = _TURN.pack(_MAGIC_BYTES, 0, -BACK, True)


class Blocks:
    """A pickle's blocks. A reader takes the turn out of the pipe, reads the next block, and puts the next turn back.

    So the file is read in order, each block by the first free process.

    Args:
        file: The file's descriptor. Its own position is not used.
        turn: Both ends of the pipe, which contains :data:`FIRST_TURN`.
        most_rest: The most bytes outside records that the blocks read here may have.
        block_bytes: The size of a block.
    """

    def __init__(self, file: int, turn: tuple[int, int], most_rest: int, block_bytes: int) -> None:
        self._file, self._turn, self._left, self._size = file, turn, most_rest, block_bytes

    def new_memory(self) -> bytearray:
        """Return memory for one block and the bytes around it."""
        return bytearray(BACK + self._size + AFTER + MAX_RECORD)

    def next(self, memory: bytearray) -> tuple[int, int, int] | None:
        """Read the next block into memory; return the memory's position in the pickle, and where block and bytes end in memory."""
        offset, left, base, more = _TURN.unpack(os.read(self._turn[0], _TURN.size))
        following = (offset, left, base, False)  # this remains if reading fails
        try:
            if not more:
                return None
            begin, own = BACK if base < 0 else 0, BACK + self._size
            memory[:begin] = bytes(begin)
            view = memoryview(memory)
            middle, offset, left = _fill(self._file, offset, left, view[begin : self._size])
            behind = self._file, offset, left
            rest, *_ = _fill(*behind, view[begin + middle : own + AFTER])
            end = begin + middle + rest
            memory[end : end + MAX_RECORD] = bytes(MAX_RECORD)
            more = end == own + AFTER
            following = (offset, left, base + self._size, more)
            return base, own if more else end, end
        finally:
            os.write(self._turn[1], _TURN.pack(*following))

    def note_rest(self, size: int) -> None:
        """Count bytes outside records, and raise :class:`OtherFormError` if there are too many."""
        self._left -= size
        if self._left < 0:
            raise OtherFormError


def _fill(file: int, offset: int, left: int, into: memoryview) -> tuple[int, int, int]:
    """Fill memory with the pickle's bytes, without frame headers; return their number, the next offset and the frame's rest."""
    at = 0
    while at < len(into):
        if not left:
            header = os.pread(file, 9, offset)
            if not header:
                break
            require(len(header) == 9 and header[0] == 0x95)
            (left,) = struct.unpack_from("<Q", header, 1)
            offset += len(header)
            continue
        read = os.preadv(file, [into[at : at + left]], offset)
        require(read > 0)
        at, left, offset = at + read, left - read, offset + read
    return at, offset, left

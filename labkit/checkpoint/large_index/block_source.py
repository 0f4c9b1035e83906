"""Hand out the blocks of a large ``.metadata`` in order, to readers in several processes."""

from __future__ import annotations

import os
import struct

from labkit.checkpoint.large_index.parts import OtherFormError, require
from labkit.checkpoint.large_index.record_layout import MAX_RECORD

BACK = 8  # bytes of the block before that stand before a block's own
AFTER = 2 * MAX_RECORD  # bytes of the block after it that stand after them: records go on there
_MAGIC_BYTES = 2
# Where the next block begins: its place in the file, what is left of the frame there, its place in the pickle; and if there is one.
_TURN = struct.Struct("<QQq?")
FIRST_TURN = _TURN.pack(_MAGIC_BYTES, 0, -BACK, True)


class Blocks:
    """A pickle's blocks. Whoever takes the turn out of the pipe reads the next block and puts the turn behind it back.

    So the file is read in order, by whichever process is free.

    Args:
        file: The file's descriptor. Its own position is not used.
        turn: Both ends of the pipe; :data:`FIRST_TURN` is in it.
        most_rest: The most bytes of the blocks read here that may be no such records.
        block_bytes: The size of a block.
    """

    def __init__(self, file: int, turn: tuple[int, int], most_rest: int, block_bytes: int) -> None:
        self._file, self._turn, self._left, self._size = file, turn, most_rest, block_bytes

    def new_memory(self) -> bytearray:
        """Memory for one block, and for the bytes around it."""
        return bytearray(BACK + self._size + AFTER + MAX_RECORD)

    def next(self, memory: bytearray) -> tuple[int, int, int] | None:
        """Put the next block into memory: where in the pickle that begins, where the block ends and where its bytes do."""
        offset, left, base, more = _TURN.unpack(os.read(self._turn[0], _TURN.size))
        following = (offset, left, base, False)  # and so it stays when filling fails
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
        """Count bytes that are no records; raises :class:`OtherFormError` when they are too many."""
        self._left -= size
        if self._left < 0:
            raise OtherFormError


def _fill(file: int, offset: int, left: int, into: memoryview) -> tuple[int, int, int]:
    """Fill memory with the pickle's bytes, headers of frames left out; how many, and where the next is."""
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

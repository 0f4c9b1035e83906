"""Host memory into which a GPU copies a state, kept from one save to the next.

A GPU copies into page-locked memory at the rate of its bus, and into ordinary memory at a tenth of that or less. Locking
pages takes longer than the copy, so they are locked only once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.checkpoint.store.page_locking import locked_memory

BLOCK_BYTES = 1 << 28
_ALIGNMENT = 512


class HostMemory:
    """Blocks of memory that each save reuses.

    Args:
        allocate: Allocates a block of so many bytes.
        block_bytes: The size of a block. A larger tensor gets its own block.
    """

    def __init__(self, allocate: Callable[[int], Tensor] = locked_memory, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._allocate, self._block_bytes = allocate, block_bytes
        self._blocks: list[Tensor] = []
        self._block = self._offset = 0

    @property
    def size_bytes(self) -> int:
        """The number of bytes held."""
        return sum(block.nbytes for block in self._blocks)

    def begin(self) -> None:
        """Begin a save: reuse the blocks that the last save filled, and free the others."""
        del self._blocks[self._block + (self._offset > 0) :]
        self._block = self._offset = 0

    def copy(self, data: Tensor) -> Tensor:
        """Start copying a tensor of any device, dtype and strides.

        Returns:
            A contiguous copy whose storage holds nothing else, valid until the next :meth:`begin`. Its values are complete once the
            device's current stream has got past this copy.
        """
        copy = torch.empty(0, dtype=data.dtype).set_(self._take(data.nbytes)).view(data.shape)
        return copy.copy_(data, non_blocking=True)

    def _take(self, size_bytes: int) -> torch.UntypedStorage:
        while self._block < len(self._blocks):
            block = self._blocks[self._block]
            if self._offset + size_bytes <= block.nbytes:
                break
            self._block, self._offset = self._block + 1, 0
        else:
            self._blocks.append(self._allocate(max(self._block_bytes, size_bytes)))
        start = self._offset
        self._offset = -(-(start + size_bytes) // _ALIGNMENT) * _ALIGNMENT
        part: torch.UntypedStorage = self._blocks[self._block].untyped_storage()[start : start + size_bytes]
        return part

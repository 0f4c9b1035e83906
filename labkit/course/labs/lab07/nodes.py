"""The number of machines that notebook 07 simulates with its ranks."""

from __future__ import annotations

_WORLD_SIZES = (2, 3, 4)


def num_nodes(world_size: int, batch_size: int) -> int:
    """Return the number of nodes: two or, if that does not divide the ranks equally, one per rank.

    Args:
        world_size: The number of ranks.
        batch_size: Sequences in one batch over all ranks.

    Raises:
        ValueError: The notebook's model or its batch cannot be divided equally; the message says what to set.

    Ranks: controller.
    """
    if world_size not in _WORLD_SIZES:
        raise ValueError(f"world_size is {world_size}, but this model can only be divided over 2, 3 or 4 ranks. Set one of these.")
    if batch_size % world_size:
        raise ValueError(f"{world_size} ranks do not divide a batch_size of {batch_size}. Set batch_size to 12.")
    return 2 if world_size % 2 == 0 else world_size

"""Real English text without a download, and batches of it that do not depend on the number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def english_text() -> Tensor:
    """Return Python's own language reference as bytes.

    Every Python includes it for ``help()`` (module ``pydoc_data.topics``): at least 450 kB of prose and code. It differs between
    Python versions, so no number in a lab may depend on its exact content.

    Returns:
        A one-dimensional uint8 tensor on the CPU. It is shared: do not write to it.

    Ranks: local.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class BatchSampler:
    """An endless iterator of batches; each rank gets its rows of one global batch.

    The global batch at a position depends only on the seed and the position. So runs with different world sizes train on the same
    data, and a run continues exactly from `state_dict`, even with another number of ranks. The state is the same on every rank;
    ``state_dict`` and ``load_state_dict`` make the sampler a `Stateful` for torch's checkpoints.

    Args:
        batch_size: Sequences per global batch; ``world_size`` divides it.
        seq_len: Tokens that the model gets; each row has one more token, the last target.
        seed: Determines which windows of the text are used, and their order.
        rank: Selects rows ``rank * b`` to ``(rank + 1) * b``, where ``b`` is ``batch_size / world_size``.
        world_size: The number of ranks that share a global batch.
        device: The device of the batches.
        text: A uint8 tensor to sample from; `english_text` by default.

    Raises:
        ValueError: ``batch_size`` or ``seq_len`` is below 1, ``world_size`` does not divide ``batch_size``, ``rank`` lies outside
            the world, or the text is too short.

    Ranks: local.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        text: Tensor | None = None,
    ) -> None:
        self.text = english_text() if text is None else text
        if batch_size < 1 or seq_len < 1:
            raise ValueError(f"{batch_size=} and {seq_len=} have to be at least 1")
        if batch_size % world_size:
            raise ValueError(f"{world_size} ranks cannot share a batch of {batch_size} evenly; take a multiple of {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside a world of {world_size}")
        if len(self.text) <= seq_len:
            raise ValueError(f"a text of {len(self.text)} bytes is too short for {seq_len} tokens and a target")
        self.batch_size, self.seq_len, self.seed = batch_size, seq_len, seed
        self.rows = slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        self.device = torch.device(device)
        self.position = 0

    def global_batch(self, position: int) -> Tensor:
        """Return the whole batch at a position: int64, (batch_size, seq_len + 1), on the CPU."""
        # Hashed, because torch's CPU generator uses only the lower 32 bits of a seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{position}".encode()))
        starts = torch.randint(len(self.text) - self.seq_len, (self.batch_size, 1), generator=generator)
        return self.text[starts + torch.arange(self.seq_len + 1)].long()

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        batch = self.global_batch(self.position)[self.rows].to(self.device)
        self.position += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the position and the settings that determine the next batches; equal on all ranks."""
        return {"position": self.position, "seed": self.seed, "batch_size": self.batch_size, "seq_len": self.seq_len}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from the position of another sampler.

        Raises:
            ValueError: The other sampler draws different batches (seed, batch size or sequence length differ).
        """
        own = self.state_dict()
        differing = [name for name in ("seed", "batch_size", "seq_len") if state[name] != own[name]]
        if differing:
            settings = ", ".join(f"{name} {state[name]}, here {own[name]}" for name in differing)
            raise ValueError(f"the saved position belongs to other data: {settings}")
        self.position = state["position"]

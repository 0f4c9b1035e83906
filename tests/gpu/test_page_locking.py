"""Host memory that is locked for a GPU: filled by threads, released with its tensor, and ordinary memory if locking fails."""

from __future__ import annotations

import pytest

from labkit import WorkerPool

pytestmark = pytest.mark.gpu(1)


def test_memory_is_locked_and_unlocked_with_its_tensor(pool: WorkerPool) -> None:
    def work() -> tuple[list[bool], bool]:
        import torch

        from labkit.checkpoint.store.page_locking import lock, locked_memory

        pinned = []
        for _ in range(3):
            memory = locked_memory(1 << 26)
            pinned.append(memory.is_pinned())
        rest = torch.empty(1 << 26, dtype=torch.uint8)
        part = rest[: 1 << 25]
        assert lock(part)
        del part
        return pinned, rest.is_pinned()

    for pinned, afterwards in pool.run(work).values():
        assert pinned == [True] * 3
        assert not afterwards


def test_what_cannot_be_locked_is_pinned_by_torch_and_the_next_kernel_does_not_fail(pool: WorkerPool) -> None:
    def work() -> tuple[bool, float, bool]:
        from unittest.mock import patch

        import torch

        from labkit.checkpoint.store import page_locking

        locked = page_locking.locked_memory(1 << 20)
        again = page_locking.lock(locked)  # the driver refuses what is locked already
        total = float(torch.ones(3, device="cuda").sum())
        with patch.object(page_locking, "lock", lambda memory: False):
            return again, total, page_locking.locked_memory(1 << 20).is_pinned()

    assert set(pool.run(work).values()) == {(False, 3.0, True)}

"""Copies of a state are exact, do not overlap, and reuse the same memory in the next save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from labkit import checkpoint
from labkit.checkpoint.files.plain_tensors import to_cpu
from labkit.checkpoint.store import saving
from labkit.checkpoint.store.host_memory import HostMemory

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint8]


def make(dtype: torch.dtype, shape: tuple[int, ...], transposed: bool) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    ones = (
        torch.randint(0, 2, (count,), dtype=torch.uint8)
        if dtype is torch.bool
        else torch.randint(0, 256, (count,), dtype=torch.uint8)
    )
    tensor = ones.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.mT if transposed and len(shape) > 1 else tensor


TENSORS = st.builds(
    make,
    st.sampled_from(DTYPES),
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 40]), max_size=3).map(tuple),
    st.booleans(),
)


def ordinary_memory(size_bytes: int) -> Tensor:
    """A machine without a GPU cannot lock memory."""
    return torch.empty(size_bytes, dtype=torch.uint8)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.nbytes else b""


@given(saves=st.lists(st.lists(TENSORS, max_size=8), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_copies_are_exact_independent_and_whole_storages(saves: list[list[Tensor]]) -> None:
    memory = HostMemory(ordinary_memory, block_bytes=2048)
    for tensors in saves:
        memory.begin()
        before = [bits(tensor) for tensor in tensors]
        copies = [memory.copy(tensor) for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        assert [bits(copy) for copy in copies] == before
        for copy, tensor in zip(copies, tensors, strict=True):
            assert (copy.shape, copy.dtype, copy.is_contiguous()) == (tensor.shape, tensor.dtype, True)
            assert to_cpu(copy, copy=False).data_ptr() == copy.data_ptr(), "the writer would copy it again"


def test_the_same_state_takes_the_same_memory_and_a_smaller_one_lets_go() -> None:
    memory = HostMemory(ordinary_memory, block_bytes=1024)
    state = [torch.ones(200), torch.ones(3000), torch.ones(1)]
    places = []
    for _ in range(3):
        memory.begin()
        places.append([memory.copy(tensor).data_ptr() for tensor in state])
    assert places[0] == places[1] == places[2]
    assert memory.size_bytes == 1024 + 12000 + 1024  # the one that is larger than a block has its own
    memory.begin()
    memory.copy(torch.ones(1))
    memory.begin()
    assert memory.size_bytes == 1024


def test_an_asynchronous_save_writes_what_it_copied_and_not_the_whole_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copy as from a GPU, with memory that is not locked."""
    memory = HostMemory(ordinary_memory)
    monkeypatch.setattr(saving, "_staged", memory.copy)
    monkeypatch.setattr(saving, "_host_memory", memory)
    state = {"a": torch.arange(1000.0), "b": torch.tensor(3)}
    for step in (1, 2):
        pending = saving.save_async(tmp_path, state, step)
        state["a"] += 1000
        directory = pending.wait(30)
        assert sum(path.stat().st_size for path in directory.iterdir()) < 20_000
        target = {"a": torch.zeros(1000), "b": torch.tensor(0)}
        checkpoint.load(tmp_path, target)
        assert torch.equal(target["a"], torch.arange(1000.0) + 1000 * (step - 1))

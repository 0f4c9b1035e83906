"""Measurements for a plan (time and bytes of each block, bandwidth of the bus), and application of a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.utils._pytree import tree_leaves

from labkit.spmd.offload.context import ActivationOffload
from labkit.spmd.offload.plan import BlockCost, Bus, Choice, OffloadPlan
from labkit.spmd.offload.transfer import CountingTransfer, HostCopy, Transfer, transfer_for

_PIECES = 8


def measure_blocks(blocks: Sequence[nn.Module], step: Callable[[], object], *, repeats: int = 5) -> list[BlockCost]:
    """Run training steps and measure each block: its bytes, once, and its shortest times.

    Args:
        blocks: Modules that run once per step, with outputs that need a gradient; none may be checkpointed or offloaded.
        step: Runs forward and backward; called ``repeats + 2`` times.
        repeats: Number of timed steps, which follow one step for the bytes and one to warm up.

    Returns:
        One cost per block. A block's backward lasts from the gradient of its output to that of its input or, if the input needs no
        gradient, to the end of the step.

    Ranks: local for a plain model; collective if ``step`` is.
    """
    sizes = [_Sizes() for _ in blocks]
    counted = [ActivationOffload([block], min_bytes=1, transfer=size) for block, size in zip(blocks, sizes, strict=True)]
    input_bytes = [0] * len(blocks)

    def note_inputs(place: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            input_bytes[place] = sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if _needs_gradient(leaf))

        return hook

    hooks = [block.register_forward_pre_hook(note_inputs(i), with_kwargs=True) for i, block in enumerate(blocks)]
    step()
    for closing in counted:
        closing.close()
    for hook in hooks:
        hook.remove()
    clock = _Clock(blocks)
    for _ in range(repeats + 1):
        clock.step(step)
    clock.close()
    return [
        # A product's backward needs both factors, so count the two largest storages.
        BlockCost(*clock.shortest(place), sum(found.sizes), input_bytes[place], sum(sorted(found.sizes)[-2:]))
        for place, found in enumerate(sizes)
    ]


def measure_bus(device: torch.device, transfer: Transfer | None = None, *, size_bytes: int = 64 << 20, repeats: int = 5) -> Bus:
    """Measure the bandwidth of each direction while both are in use, as they are in an offload.

    Args:
        device: The device that computes.
        transfer: How bytes move; by default, as suits the device. A transfer that only counts has no bandwidth.
        size_bytes: Bytes under way at a time in each direction, divided into eight copies.
        repeats: Number of timed rounds, after one to warm up.

    Raises:
        ValueError: The transfer moves nothing, as on a CPU unless a bus is given.

    Ranks: local. Blocks until the copies are done. Ranks that share a bus should measure at the same time.
    """
    bus = transfer or transfer_for(device)
    if bus.is_alias:
        raise ValueError(f"nothing moves on {device}: there is no bus to measure. Give a transfer such as SlowBus.")
    # Run several copies at a time, to measure a busy bus rather than the start-up time of a copy.
    sources = [torch.ones(size_bytes // _PIECES, dtype=torch.uint8, device=device) for _ in range(_PIECES)]
    waiting = [bus.send(source) for source in sources]
    rates = []
    for _ in range(repeats + 1):
        for copy in waiting:
            bus.wait_sent(copy)
        _synchronize(device)
        began_s = time.perf_counter()
        leaving, arriving = [bus.send(source) for source in sources], [bus.fetch(copy) for copy in waiting]
        for sent, fetched in zip(leaving, waiting, strict=True):
            bus.wait_sent(sent)
            bus.wait_fetched(fetched)
        _synchronize(device)
        rates.append(sum(target.numel() for target in arriving) / (time.perf_counter() - began_s))
        for copy in waiting:
            bus.recycle(copy)
        waiting = leaving
    for copy in waiting:
        bus.recycle(copy)
    return Bus(max(rates[1:]), max(rates[1:]))


def measure_seconds(step: Callable[[], object], device: torch.device, *, repeats: int = 5) -> float:
    """Return the shortest time of several steps after one to warm up, since other work on the machine only makes steps longer.

    Ranks: as ``step``.
    """
    seconds = []
    for _ in range(repeats + 1):
        _synchronize(device)
        began_s = time.perf_counter()
        step()
        _synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    return min(seconds[1:])


def apply_plan(blocks: Sequence[nn.Module], plan: OffloadPlan, **options: Any) -> ActivationOffload | None:
    """Apply a plan to the blocks of a model, before or after it is sharded.

    Args:
        blocks: The blocks that the plan is for. Those to recompute get torch's composable ``checkpoint``, permanently.
        plan: The plan, with one choice per block.
        options: Passed to `ActivationOffload`.

    Returns:
        The offload that moves activations as planned; None if the plan moves nothing.

    Raises:
        ValueError: The number of choices is not the number of blocks.

    Ranks: local.
    """
    moving = []
    for block, choice in zip(blocks, plan.choices, strict=True):
        if choice in (Choice.RECOMPUTE, Choice.MOVE_INPUTS):
            checkpoint(block)
        if choice in (Choice.MOVE, Choice.MOVE_INPUTS):
            moving.append(block)
    return ActivationOffload(moving, **options) if moving else None


class _Sizes(CountingTransfer):
    """A transfer that only records the sizes of the storages that would move."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def send(self, source: Tensor) -> HostCopy:
        self.sizes.append(source.numel())
        return super().send(source)


class _Clock:
    """The times at which each block begins and ends forward and backward."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._marks: dict[tuple[str, int], Any] = {}
        self._device = next(blocks[0].parameters()).device
        self._times: list[list[tuple[float, float]]] = [[] for _ in blocks]
        self._handles = []
        for place, block in enumerate(blocks):
            self._handles.append(block.register_forward_pre_hook(self._begin(place), with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._end(place)))

    def step(self, step: Callable[[], object]) -> None:
        self._marks.clear()
        step()
        end = self._now()
        _synchronize(self._device)
        for place, times in enumerate(self._times):
            marks = [self._marks.get((name, place), end) for name in ("begin", "end", "back begin", "back end")]
            times.append((self._between(*marks[:2]), self._between(*marks[2:])))

    def shortest(self, place: int) -> tuple[float, float]:
        timed = self._times[place][1:]
        return min(forward for forward, _ in timed), min(backward for _, backward in timed)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, place: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            for leaf in tree_leaves((args, kwargs)):
                if _needs_gradient(leaf):
                    leaf.register_hook(lambda _: self._mark("back end", place))
            self._mark("begin", place)

        return hook

    def _end(self, place: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            self._mark("end", place)
            for leaf in tree_leaves(output):
                if _needs_gradient(leaf):
                    leaf.register_hook(lambda _: self._mark("back begin", place))

        return hook

    def _mark(self, name: str, place: int) -> None:
        self._marks[name, place] = self._now()

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000 if self._device.type == "cuda" else end - begin


def _needs_gradient(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""labkit's activation offload: exact gradients, bytes counted, the limit kept, and mistakes refused."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.transformer import ModelConfig, Transformer, next_token_loss
from labkit.spmd.offload.context import ActivationOffload, OffloadError
from labkit.spmd.offload.transfer import CountingTransfer, HostCopy

CONFIG = ModelConfig(dim=16, num_layers=4, num_heads=2, hidden_dim=24, max_seq_len=16)
BATCH, SEQ = 2, 16
TENSOR_BYTES = BATCH * SEQ * CONFIG.dim * 4
SMALLEST = 1024


class LazyTransfer:
    """A bus as slow as is allowed: bytes travel at the last moment, and until then both ends contain garbage.

    Code that reads or frees before waiting computes wrong gradients.
    """

    is_alias = False

    def __init__(self) -> None:
        self.pending: dict[HostCopy, tuple[Tensor, Tensor]] = {}
        self.num_host, self.free = 0, list[HostCopy]()
        self.events: list[str] = []

    def send(self, source: Tensor) -> HostCopy:
        waiting = [copy for copy in self.free if copy.host.numel() == source.numel()]
        copy = waiting[0] if waiting else HostCopy(torch.empty_like(source))
        if waiting:
            self.free.remove(copy)
        else:
            self.num_host += source.numel()
        copy.host.fill_(113)
        self.pending[copy] = (copy.host, source)
        self.events.append("send")
        return copy

    def wait_sent(self, copy: HostCopy) -> None:
        self._finish(copy)

    def fetch(self, copy: HostCopy) -> Tensor:
        assert copy not in self.pending, "asked back before it had left"
        target = torch.full_like(copy.host, 97)
        self.pending[copy] = (target, copy.host)
        self.events.append("fetch")
        return target

    def wait_fetched(self, copy: HostCopy) -> None:
        self._finish(copy)

    def recycle(self, copy: HostCopy) -> None:
        assert copy not in self.pending, "recycled while bytes are under way"
        self.free.append(copy)

    def host_bytes(self) -> int:
        return self.num_host

    def _finish(self, copy: HostCopy) -> None:
        if copy in self.pending:
            target, source = self.pending.pop(copy)
            target.copy_(source)


def batch() -> Tensor:
    return next(BatchSampler(batch_size=BATCH, seq_len=SEQ))


def gradients(
    prepare: Callable[[Transformer], ActivationOffload | None] = lambda model: None, steps: int = 1
) -> tuple[list[Tensor], ActivationOffload | None]:
    model = build_model(CONFIG)
    offload = prepare(model)
    for _ in range(steps):
        next_token_loss(model, batch()).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], offload


def offloading(last: int = 4, **options: Any) -> Callable[[Transformer], ActivationOffload]:
    return lambda model: ActivationOffload(model.layers[:last], min_bytes=SMALLEST, **options)


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right) > 30
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# Exactness ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, TENSOR_BYTES, 3 * TENSOR_BYTES, 20 * TENSOR_BYTES, 1 << 30])
def test_gradients_are_equal_bit_for_bit_however_slow_the_bus(limit: int) -> None:
    transfer = LazyTransfer()
    moved, offload = gradients(offloading(max_in_flight_bytes=limit, transfer=transfer), steps=3)
    assert_equal(moved, gradients(steps=3)[0])
    assert offload is not None
    assert offload.counts.num_moved > 100
    assert not transfer.pending
    assert offload.in_flight_bytes == 0


def test_without_a_device_it_counts_the_same_and_moves_nothing() -> None:
    limit = 3 * TENSOR_BYTES
    counted, counting = gradients(offloading(max_in_flight_bytes=limit))
    moved, moving = gradients(offloading(max_in_flight_bytes=limit, transfer=LazyTransfer()))
    assert_equal(counted, moved)
    assert counting is not None
    assert moving is not None
    assert counting.counts == moving.counts
    assert counting.host_bytes == 0 < moving.host_bytes


def test_host_memory_of_one_step_serves_the_next() -> None:
    _, one = gradients(offloading(transfer=LazyTransfer()))
    _, four = gradients(offloading(transfer=LazyTransfer()), steps=4)
    assert one is not None
    assert four is not None
    assert one.host_bytes == four.host_bytes == one.counts.moved_bytes


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_around_a_checkpointed_block_only_its_inputs_move(use_reentrant: bool) -> None:
    kind = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT

    def prepare(model: Transformer) -> ActivationOffload:
        model.layers = nn.ModuleList(checkpoint_wrapper(block, kind) for block in model.layers)
        return ActivationOffload(model.layers, min_bytes=SMALLEST, transfer=LazyTransfer())

    moved, offload = gradients(prepare)
    assert_equal(moved, gradients()[0])
    assert offload is not None
    assert offload.counts.moved_bytes == CONFIG.num_layers * TENSOR_BYTES


def test_inside_a_checkpoint_everything_moves_and_nothing_is_recomputed() -> None:
    forwards = []

    def prepare(model: Transformer) -> ActivationOffload:
        offload = ActivationOffload(model.layers, min_bytes=SMALLEST, transfer=LazyTransfer())
        for block in model.layers:
            block.register_forward_pre_hook(lambda *_: forwards.append(1))
        model.layers = nn.ModuleList(checkpoint_wrapper(block) for block in model.layers)
        return offload

    moved, offload = gradients(prepare)
    assert_equal(moved, gradients()[0])
    assert offload is not None
    assert offload.counts.moved_bytes > 10 * CONFIG.num_layers * TENSOR_BYTES
    assert len(forwards) == CONFIG.num_layers


@settings(max_examples=12)
@given(order=st.permutations(range(4)), limit=st.integers(0, 40), seed=st.integers(0, 99))
def test_several_forwards_may_wait_for_their_backward_in_any_order(order: list[int], limit: int, seed: int) -> None:
    def train(offloaded: bool) -> list[Tensor]:
        model = build_model(CONFIG)
        if offloaded:
            ActivationOffload(
                model.layers, min_bytes=SMALLEST, max_in_flight_bytes=limit * TENSOR_BYTES // 2, transfer=LazyTransfer()
            )
        dice, losses = random.Random(seed), list[Tensor]()
        sampler = BatchSampler(batch_size=BATCH, seq_len=SEQ)
        waiting = list(order)
        while waiting:
            if len(losses) < 4 and dice.random() < 0.6:
                losses.append(next_token_loss(model, next(sampler)))
            elif len(losses) > waiting[0]:
                losses[waiting.pop(0)].backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert_equal(train(True), train(False))


def test_backward_twice_gives_the_gradients_twice() -> None:
    model = build_model(CONFIG)
    offload = ActivationOffload(model.layers, min_bytes=SMALLEST, max_in_flight_bytes=2 * TENSOR_BYTES, transfer=LazyTransfer())
    loss = next_token_loss(model, batch())
    loss.backward(retain_graph=True)
    loss.backward()
    once, _ = gradients(steps=1)
    assert_equal([p.grad for p in model.parameters() if p.grad is not None], [2 * gradient for gradient in once])
    del loss
    assert offload.in_flight_bytes == 0


def test_views_strides_and_dtypes_come_back_as_they_left() -> None:
    torch.manual_seed(0)
    base = torch.randn(8, 6, 4, dtype=torch.float64)
    views = [base.transpose(0, 2), base[1:5, ::2], base.flatten()[3:], base[0].expand(3, 6, 4), base.to(torch.bfloat16).float()]
    seen: list[Tensor] = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(*views)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.extend(ctx.saved_tensors)
            return grad

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Keep.apply(x)
            return out

    block = Block()
    offload = ActivationOffload([block], min_bytes=1, max_in_flight_bytes=0, transfer=LazyTransfer())
    block(torch.ones(2, requires_grad=True)).sum().backward()
    for left, right in zip(seen, views, strict=True):
        assert torch.equal(left, right)
        assert (left.stride(), left.storage_offset(), left.dtype) == (right.stride(), right.storage_offset(), right.dtype)
    assert offload.counts.num_moved == 2  # one storage for four views, and the one of the cast


# Counts and the limit -------------------------------------------------------------------------------------------------


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(8, 32, bias=False), nn.Linear(8, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(x) * self.gate(x)
        return out


def test_each_storage_is_counted_once_and_weights_stay() -> None:
    block = Feed()
    with ActivationOffload([block], min_bytes=1) as offload:
        block(torch.ones(4, 8, requires_grad=True) * 1).sum().backward()
    counts = offload.counts
    x, hidden, weight = 4 * 8 * 4, 4 * 32 * 4, 8 * 32 * 4
    assert counts.moved_bytes == x + 2 * hidden
    assert counts.repeated_bytes == x
    assert counts.weight_bytes == 2 * weight
    assert counts.saved_bytes == 2 * x + 2 * hidden + 2 * weight
    assert counts.num_moved == 3


def test_small_and_foreign_tensors_stay() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() + torch.view_as_complex(x.view(-1, 2)).conj().resolve_conj().real.sum()

    block = Block()
    with ActivationOffload([block], min_bytes=400) as offload:
        block(torch.ones(64, requires_grad=True) * 1).sum().backward()
    assert offload.counts.moved_bytes == 0
    assert offload.counts.small_bytes == 64 * 4
    assert offload.counts.saved_bytes == offload.counts.small_bytes + offload.counts.other_bytes


def test_an_empty_tensor_on_the_host_that_is_saved_first_keeps_nothing_from_moving() -> None:
    # torch.utils.checkpoint of torch 2.11 saves one before the inputs. Without CUDA, autograd does not accept a fake tensor that
    # claims to be on a GPU, so the hooks are called by hand.
    block = nn.Module()
    with ActivationOffload([block], min_bytes=1, transfer=CountingTransfer()) as offload:
        offload._enter(block, ())
        offload._pack(torch.empty(0))
        with FakeTensorMode():
            offload._pack(torch.ones(4, device="cuda"))
        offload._pack(torch.ones(8))
        offload._leave()
    assert offload.counts.moved_bytes == 16
    assert offload.counts.other_bytes == 32


@settings(max_examples=20)
@given(limit=st.integers(0, 60))
def test_the_limit_holds_at_every_moment(limit: int) -> None:
    largest = BATCH * SEQ * CONFIG.hidden_dim * 4
    _, offload = gradients(offloading(max_in_flight_bytes=limit * TENSOR_BYTES, transfer=LazyTransfer()))
    assert offload is not None
    assert offload.counts.peak_in_flight_bytes <= max(limit * TENSOR_BYTES, largest)


def test_backward_asks_ahead_and_what_it_needs_first_never_left() -> None:
    limit = 6 * TENSOR_BYTES
    _, offload = gradients(offloading(max_in_flight_bytes=limit, transfer=LazyTransfer()))
    assert offload is not None
    counts = offload.counts
    assert counts.moved_bytes - limit <= counts.fetched_bytes < counts.moved_bytes
    assert counts.num_late == 0
    assert gradients(offloading(max_in_flight_bytes=0, transfer=LazyTransfer()))[1].counts.num_late > 40  # type: ignore[union-attr]


def test_a_forward_without_a_backward_leaves_nothing_behind() -> None:
    transfer = LazyTransfer()
    model = build_model(CONFIG)
    offload = ActivationOffload(model.layers, min_bytes=SMALLEST, transfer=transfer)
    loss = next_token_loss(model, batch())
    assert offload.in_flight_bytes > 0
    del loss
    gc.collect()
    assert offload.in_flight_bytes == 0
    assert not transfer.pending
    moved = offload.reset_counts().moved_bytes
    with torch.no_grad():
        model(batch()[:, :-1])
    assert offload.counts.saved_bytes == 0 < moved


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", [False, True])
def test_a_saved_tensor_that_changes_in_place_is_refused_as_autograd_does(alias: bool) -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            return y.mul_(2)

    block = Block()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        block(torch.ones(64, requires_grad=True)).sum().backward()
    ActivationOffload([block], min_bytes=1, transfer=None if alias else LazyTransfer())
    with pytest.raises(OffloadError, match="changed in place after it was saved"):
        block(torch.ones(64, requires_grad=True)).sum().backward()


def test_a_tensor_that_changes_after_it_has_left_keeps_its_copy() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            z = y.sin() + x.cos().sum() * 0  # saving x for the cosine pushes y out, because nothing may be in flight
            y.detach().zero_()
            return z

    block, x = Block(), torch.full((64,), 0.5, requires_grad=True)
    ActivationOffload([block], min_bytes=1, max_in_flight_bytes=0, transfer=LazyTransfer())
    block(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((64,), 0.5).cos())


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda model: [], "no block is given"),
        (lambda model: [model.layers[0], model.layers[0]], "given twice"),
        (lambda model: [model, model.layers[1]], r"block 1 \(Block\) is given twice or lies inside block 0"),
        (lambda model: [model.layers[1].attention, model.layers[1]], "lies inside block 1"),
    ],
)
def test_blocks_that_cannot_be_told_apart_are_refused(choose: Callable[[Any], list[nn.Module]], message: str) -> None:
    with pytest.raises(OffloadError, match=message):
        ActivationOffload(choose(build_model(CONFIG)))


def test_a_block_that_raises_leaves_no_hook_behind() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("broken")

    block, x = Block(), torch.ones(512, requires_grad=True)
    offload = ActivationOffload([block], min_bytes=1)
    with pytest.raises(KeyError):
        block(x)
    (x * x).sum().backward()
    assert offload.counts.saved_bytes == 0


def test_closing_between_forward_and_backward_is_safe() -> None:
    model = build_model(CONFIG)
    offload = ActivationOffload(model.layers, min_bytes=SMALLEST, max_in_flight_bytes=TENSOR_BYTES, transfer=LazyTransfer())
    loss = next_token_loss(model, batch())
    offload.close()
    loss.backward()
    assert_equal([p.grad for p in model.parameters() if p.grad is not None], gradients()[0])
    saved = offload.counts.saved_bytes
    next_token_loss(model, batch()).backward()
    assert offload.counts.saved_bytes == saved


def test_a_checkpoint_called_by_hand_inside_a_block_moves_its_inputs() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    torch.manual_seed(1)
    block = Block()
    x = torch.randn(4, 8, requires_grad=True)
    block(x * 1).square().sum().backward()
    expected = [x.grad, *(p.grad for p in block.parameters())]
    x.grad = None
    block.zero_grad()
    with ActivationOffload([block], min_bytes=1, transfer=LazyTransfer()) as offload:
        block(x * 1).square().sum().backward()
    for left, right in zip([x.grad, *(p.grad for p in block.parameters())], expected, strict=True):
        assert left is not None
        assert right is not None
        assert torch.equal(left, right)
    assert offload.counts.moved_bytes == 4 * 8 * 4


@pytest.mark.parametrize("first", ["offload", "checkpoint"])
def test_torch_s_composable_checkpoint_on_the_same_block_recomputes_in_either_order(first: str) -> None:
    forwards = []

    def prepare(model: Transformer) -> ActivationOffload:
        if first == "checkpoint":
            for block in model.layers:
                composable_checkpoint(block)
        offload = ActivationOffload(model.layers, min_bytes=SMALLEST, transfer=LazyTransfer())
        if first == "offload":
            for block in model.layers:
                composable_checkpoint(block)
        for block in model.layers:
            block.attention.register_forward_pre_hook(lambda *_: forwards.append(1))
        return offload

    moved, offload = gradients(prepare)
    assert_equal(moved, gradients()[0])
    assert offload is not None
    assert offload.counts.moved_bytes == CONFIG.num_layers * TENSOR_BYTES
    assert len(forwards) == 2 * CONFIG.num_layers

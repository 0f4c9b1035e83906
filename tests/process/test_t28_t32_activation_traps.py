"""Traps T28 to T32, and claims of notebook 02 about torch. If a new torch fails one of these tests, a sentence there is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper, offload_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import labkit
from labkit.spmd.memory.spy import count_forwards, spy_save_on_cpu
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.transformer import Block, ModelConfig, Transformer, next_token_loss
from labkit.spmd.offload.context import ActivationOffload
from labkit.spmd.trace.collectives import count_collectives
from tests.matrix import matrix

SMALL = ModelConfig(dim=16, num_layers=3, num_heads=4, hidden_dim=24, max_seq_len=16)


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def batch() -> Tensor:
    return next(BatchSampler(batch_size=4, seq_len=16, rank=dist.get_rank(), world_size=dist.get_world_size()))


def sharded(model: Transformer, **options: object) -> Transformer:
    for module in (*model.layers, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)  # type: ignore[arg-type]
    return model


def wrapper_and_labkit() -> tuple[int, int, int, int]:
    wrapped = build_model(SMALL)
    for place, block in enumerate(wrapped.layers):
        wrapped.layers[place] = offload_wrapper(block)
    sharded(wrapped)
    with spy_save_on_cpu() as spied:
        next_token_loss(wrapped, batch()).backward()
    model = sharded(build_model(SMALL))
    with ActivationOffload(model.layers, min_bytes=1) as offload:
        next_token_loss(model, batch()).backward()
    counts = offload.counts
    weights = sum(p.numel() * 4 for name, p in build_model(SMALL).layers.named_parameters() if "norm" not in name)
    return spied.moved_bytes, counts.saved_bytes, counts.weight_bytes - weights, counts.moved_bytes


def test_t28_the_wrapper_moves_whole_weights_and_labkit_s_offload_moves_none(pool: labkit.WorkerPool) -> None:
    for by_wrapper, saved, weights_beside_projections, moved in pool.run(wrapper_and_labkit).values():
        assert by_wrapper == saved  # also under FSDP, where a rank holds only a part of each weight
        assert weights_beside_projections >= 0
        assert moved < 0.8 * by_wrapper


def kept_with_policy() -> tuple[int, int]:
    kept = []
    for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        model = sharded(build_model(SMALL), **options)
        with ActivationOffload([model], min_bytes=1) as watch:
            next_token_loss(model, batch()).backward()
        kept.append(watch.counts.moved_bytes)
    return kept[0], kept[1]


def test_parameter_offload_keeps_every_activation(pool: labkit.WorkerPool) -> None:
    for without, with_policy in pool.run(kept_with_policy).values():
        assert without == with_policy > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_t29_reentrant_recomputation_of_data_trains_nothing_in_silence(use_reentrant: bool) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        second(checkpoint(first, torch.ones(2, 4), use_reentrant=use_reentrant)).sum().backward()
    assert second.weight.grad is not None
    assert (first.weight.grad is None) == use_reentrant


@pytest.mark.parametrize("preserve", [False, True])
def test_t30_without_the_state_of_the_dice_gradients_are_wrong(preserve: bool) -> None:
    def gradient(recompute: bool) -> Tensor:
        torch.manual_seed(1)
        layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        x = torch.ones(16, 8)
        out = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=preserve) if recompute else layer(x)
        out.sum().backward()
        grad = next(layer.parameters()).grad
        assert grad is not None
        return grad

    assert torch.equal(gradient(True), gradient(False)) == preserve


def test_t31_a_wrapped_block_has_one_name_for_parameters_and_another_in_the_state_dict() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    # Only the wrapper itself hides its prefix.
    assert [name for name, _ in model.named_parameters()] == [
        "0._checkpoint_wrapped_module.weight",
        "0._checkpoint_wrapped_module.bias",
    ]
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert [name for name, _ in model[0].named_parameters()] == ["weight", "bias"]


def test_t32_eager_selective_recomputation_moves_nothing_to_the_host() -> None:
    policy = getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", None)
    if policy is None:
        pytest.skip("this torch has no MUST_CPU_OFFLOAD")
    products = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            products.append(1)
            return super().forward(x)

    layer = nn.Sequential(Counted(8, 8), nn.GELU(), Counted(8, 8))
    contexts = partial(create_selective_checkpoint_contexts, lambda ctx, op, *args, **kwargs: policy)
    with spy_save_on_cpu() as spied:
        out = checkpoint(layer, torch.ones(4, 8, requires_grad=True), use_reentrant=False, context_fn=contexts)
        out.sum().backward()
    assert spied.moved_bytes == 0
    assert len(products) == 4


def gathers(engine: str, outside: bool, kind: str) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(module: nn.Module) -> nn.Module:
        if engine == "FSDP1":
            return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
        return fully_shard(module, mesh=mesh)

    model = build_model(SMALL)
    for place, block in enumerate(model.layers):
        model.layers[place] = (
            checkpoint_wrapper(shard(block), CheckpointImpl[kind])
            if outside
            else shard(checkpoint_wrapper(block, CheckpointImpl[kind]))
        )
    whole = shard(model)
    next_token_loss(whole, batch()).backward()
    with (
        count_forwards(module for module in whole.modules() if isinstance(module, Block)) as forwards,
        count_collectives() as log,
    ):
        next_token_loss(whole, batch()).backward()
    assert forwards == [2, 2, 2]
    return log.counts


@pytest.mark.parametrize("kind", ["NO_REENTRANT", "REENTRANT"])
@pytest.mark.parametrize("outside", [False, True], ids=["inside FSDP", "around FSDP"])
@pytest.mark.parametrize("engine", ["FSDP1", "FSDP2"])
def test_only_reentrant_recomputation_around_fsdp1_gathers_again(
    pool: labkit.WorkerPool, engine: str, outside: bool, kind: str
) -> None:
    again = SMALL.num_layers if (engine, outside, kind) == ("FSDP1", True, "REENTRANT") else 0
    assert pool.run(gathers, engine, outside, kind, timeout_s=60)[0]["all_gather"] == 1 + 2 * SMALL.num_layers + again

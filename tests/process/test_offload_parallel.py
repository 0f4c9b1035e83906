"""Activation offload under mixed precision, gradient accumulation and tensor parallelism: exact, and weights stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import labkit
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.transformer import Block, ModelConfig, Transformer, next_token_loss
from labkit.spmd.offload.context import ActivationOffload, OffloadCounts
from tests.matrix import matrix

SMALL = ModelConfig(dim=16, num_layers=3, num_heads=4, hidden_dim=24, max_seq_len=16)
PROJECTIONS = SMALL.num_layers * (4 * 16 * 16 + 3 * 16 * 24)
Wrap = Callable[[Transformer], nn.Module]


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def fsdp2_bf16(model: Transformer) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model


def fsdp1_bf16(use_orig_params: bool) -> Wrap:
    return lambda model: FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
        use_orig_params=use_orig_params,
    )


def tensor_parallel(model: Transformer) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
    for block in model.layers:
        parallelize_module(block.feed_forward, mesh, plan)
    return model


WRAPS: dict[str, Wrap] = {
    "FSDP2": fsdp2_bf16,
    "FSDP1": fsdp1_bf16(False),
    "FSDP1 original parameters": fsdp1_bf16(True),
    "TP": tensor_parallel,
}


def trained(wrap: str, offloaded: bool, num_micro: int) -> tuple[list[Tensor], OffloadCounts | None]:
    model = build_model(SMALL)
    blocks = list(model.layers)
    whole = WRAPS[wrap](model)
    offload = ActivationOffload(blocks, min_bytes=1, max_in_flight_bytes=4000) if offloaded else None
    # Under tensor parallelism all ranks see the same batch.
    shares = {} if wrap == "TP" else {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    batches = BatchSampler(batch_size=4, seq_len=16, **shares)  # type: ignore[arg-type]
    losses = [next_token_loss(whole, next(batches)) for _ in range(num_micro)]
    for loss in losses:  # the oldest first, as in a pipeline
        loss.backward()
    gradients = [parameter.grad for parameter in whole.parameters() if parameter.grad is not None]
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients], offload.counts if offload else None


def compared(wrap: str, num_micro: int) -> tuple[bool, OffloadCounts | None]:
    moved, counts = trained(wrap, True, num_micro)
    kept, _ = trained(wrap, False, num_micro)
    assert sum(gradient.numel() for gradient in kept) > 0
    return all(torch.equal(a, b) for a, b in zip(moved, kept, strict=True)), counts


@pytest.mark.parametrize("wrap", ["FSDP2", "FSDP1", "FSDP1 original parameters"])
def test_weights_in_low_precision_stay_and_gradients_are_exact(pool: labkit.WorkerPool, wrap: str) -> None:
    for exact, counts in pool.run(compared, wrap, 1, timeout_s=60).values():
        assert exact
        assert counts is not None
        assert counts.weight_bytes >= 2 * PROJECTIONS  # bfloat16, and whole: FSDP has gathered them
        assert counts.moved_bytes > 0 == counts.other_bytes


def test_two_forwards_before_the_first_backward_are_exact(pool: labkit.WorkerPool) -> None:
    # FSDP1 cannot do this, with or without offload: its second backward finds no parameters.
    for exact, counts in pool.run(compared, "FSDP2", 2, timeout_s=60).values():
        assert exact
        assert counts is not None
        assert counts.peak_in_flight_bytes <= 4000


def test_what_tensor_parallelism_saves_as_dtensors_stays_and_the_rest_moves(pool: labkit.WorkerPool) -> None:
    for exact, counts in pool.run(compared, "TP", 1, timeout_s=60).values():
        assert exact
        assert counts is not None
        assert counts.moved_bytes > 0

"""Claims of notebook 04 about torch. If a new torch fails one of these tests, the sentence in the notebook is wrong too."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import labkit
from labkit.spmd.model.transformer import Block, Transformer, next_token_loss
from labkit.spmd.shards.sharding import shard_model
from labkit.spmd.trace.events import Trace, first_difference
from labkit.spmd.trace.recorder import record_events
from tests.matrix import matrix
from tests.process.s3_scenarios import (
    SMALL,
    batches,
    losses_of,
    mesh_of_all,
    replica_mesh,
    small_model,
    traced,
    wrap_fsdp1,
    wrap_fsdp2,
)

BACKWARD = ("U 2", "U 1", "R 2", "U 0", "R 1", "R 0", "R root")


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def sharded() -> Transformer:
    return shard_model(small_model("cpu"), mesh_of_all("cpu"), blocks=Block)


def kinds_of_parameters() -> list[tuple[str, str]]:
    model = sharded()
    seen = []

    def look(*_: Any) -> None:
        seen.append((type(model.layers[0].ffn_norm.weight).__name__, type(model.norm.weight).__name__))

    look()
    model.layers[0].ffn_norm.register_forward_pre_hook(look)
    loss = next_token_loss(model, batches("cpu", 1)[0])
    look()
    loss.backward()
    look()
    return seen


def test_the_root_stays_whole_after_forward_and_a_block_does_not(pool: labkit.WorkerPool) -> None:
    assert pool.run(kinds_of_parameters).same() == [
        ("DTensor", "DTensor"),
        ("Parameter", "Parameter"),
        ("DTensor", "Parameter"),
        ("DTensor", "DTensor"),
    ]


def prefetching(which: str) -> Trace:
    model = sharded()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if which == "forward":
                blocks = list(model.layers)
                place = blocks.index(module) + 1 if module in blocks else 0
                module.set_modules_to_forward_prefetch(blocks[place : place + 2])  # type: ignore[arg-type]
            else:
                module.set_modules_to_backward_prefetch([] if which == "empty" else [module])
    return traced(model, "cpu")


def test_an_empty_list_does_not_switch_prefetch_off_and_naming_itself_does(pool: labkit.WorkerPool) -> None:
    empty, own = (pool.run(prefetching, which)[0] for which in ("empty", "itself"))
    assert empty.order(names=False, phase="backward") == BACKWARD
    assert own.order(names=False, phase="backward") == ("U 2", "R 2", "U 1", "R 1", "U 0", "R 0", "R root")
    assert own.peak_live_bytes == empty.peak_live_bytes - empty.blocks[1].whole_bytes


def test_forward_prefetch_of_two_keeps_three_blocks_whole(pool: labkit.WorkerPool) -> None:
    trace = pool.run(prefetching, "forward")[0]
    assert trace.order(names=False, phase="forward") == ("U root", "U 0", "U 1", "U 2", "R 0", "R 1", "R 2")
    assert trace.peak_live_bytes == sum(block.whole_bytes for block in trace.blocks)


def gather_buffers() -> dict[str, list[int]]:
    """Return the number of live gather results each time the computation waits for a block."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    model = sharded()
    seen: dict[str, list[int]] = {"forward": [], "backward": []}
    original = FSDPParamGroup.wait_for_unshard

    def wait(group: Any) -> Any:
        kept = group.comm_ctx.all_gather_state
        results = [group._all_gather_result, kept and kept.all_gather_result]
        alive = [result for result in results if result and result.all_gather_output.untyped_storage().nbytes()]
        if group._all_gather_result:
            seen["forward" if "FORWARD" in str(group._training_state) else "backward"].append(len(alive))
        return original(group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPParamGroup, "wait_for_unshard", wait)
        next_token_loss(model, batches("cpu", 1)[0]).backward()
    return seen


def test_in_forward_the_buffer_of_one_gather_lives_until_the_next_has_come(pool: labkit.WorkerPool) -> None:
    # Implicit prefetch: on a GPU the next gather runs while a block computes. The host's order shows only the buffers.
    assert pool.run(gather_buffers).same() == {"forward": [1, 2, 2, 2], "backward": [1, 1, 1]}


def recomputed() -> Trace:
    model = small_model("cpu")
    for block in model.layers:
        checkpoint(block)
    return traced(shard_model(model, mesh_of_all("cpu"), blocks=Block), "cpu")


def test_activation_checkpointing_adds_no_gather(pool: labkit.WorkerPool) -> None:
    trace = pool.run(recomputed)[0]
    assert trace.counts() == {"all_gather": 7, "reduce_scatter": 4}
    assert trace.order(names=False, phase="backward") == BACKWARD


def replicated_gradients() -> list[list[Tensor]]:
    """Return the all-reduces of one backward, with FSDP1 under NO_SHARD and with FSDP2 on a mesh of replicas."""
    warnings.simplefilter("ignore")
    models = [wrap(small_model("cpu"), "cpu", "auto", "NO_SHARD") for wrap in (wrap_fsdp1, wrap_fsdp2)]
    original = dist.all_reduce
    buffers: list[list[Tensor]] = []

    def all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
        buffers[-1].append(tensor.clone())
        return original(tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        for model in models:
            buffers.append([])
            next_token_loss(model, batches("cpu", 1)[0]).backward()
    return buffers


def test_replicas_add_up_the_same_buffers_in_fsdp1_and_fsdp2(pool: labkit.WorkerPool) -> None:
    for old, new in pool.run(replicated_gradients).values():
        assert len(old) == len(new) == 4
        for one, other in zip(old, new, strict=True):
            factor = float(one.flatten()[0] / other.flatten()[0])  # FSDP1 divides before the sum, by a power of two
            assert factor in (1.0, 0.5, 0.25)
            assert torch.equal(one.flatten(), other.flatten() * factor)


def spread(tensor: Tensor) -> float:
    mine = tensor.detach()
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    return max(float((other - others[0]).abs().max()) for other in others)


def hybrid(mesh: bool) -> tuple[float, float]:
    """Return the distance of the ranks' weights after some steps, with FSDP1 and with FSDP2."""
    warnings.simplefilter("ignore")
    old: Any = FullyShardedDataParallel(
        small_model("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=replica_mesh("cpu") if mesh else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    new: Any = wrap_fsdp2(small_model("cpu"), "cpu", "auto", "NO_SHARD")
    losses_of(old, "cpu")
    losses_of(new, "cpu")
    return spread(old.norm.weight), spread(new.norm.weight.to_local())


@pytest.mark.parametrize("mesh", [False, True], ids=["no mesh", "one rank per replica"])
def test_hybrid_sharding_of_fsdp1_with_one_rank_per_replica_averages_nothing(pool: labkit.WorkerPool, mesh: bool) -> None:
    old, new = pool.run(hybrid, mesh).same()
    assert old > 1e-3
    assert new == 0.0


def hybrid_by_hand() -> str:
    with pytest.raises(ValueError, match="Manual wrapping") as caught:
        FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=torch.device("cpu"))
    return str(caught.value)


def test_hybrid_sharding_by_hand_wants_a_mesh(pool: labkit.WorkerPool) -> None:
    assert "device_mesh" in pool.run(hybrid_by_hand)[0]


def early_optimizer() -> list[float]:
    model = small_model("cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh_of_all("cpu"))
    (batch,) = batches("cpu", 1)
    losses = []
    for _ in range(3):
        loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def test_an_optimizer_built_before_sharding_changes_nothing_in_silence(pool: labkit.WorkerPool) -> None:
    assert len(set(pool.run(early_optimizer)[0])) == 1


class Wayward(Transformer):
    """The last rank swaps two blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, seq = self.embed(tokens), tokens.shape[1]
        blocks = list(self.layers)
        if dist.get_rank() == dist.get_world_size() - 1:
            blocks[:2] = reversed(blocks[:2])
        for block in blocks:
            x = block(x, self.rope_cos[:seq], self.rope_sin[:seq])
        logits: Tensor = self.head(self.norm(x))
        return logits


def swapped() -> tuple[Trace, list[int]]:
    truth, model = small_model("cpu"), Wayward(SMALL)
    model.load_state_dict(truth.state_dict())
    shard_model(model, mesh_of_all("cpu"), blocks=Block)
    right: list[int] = []

    def look(block: Any, _: Any) -> None:
        whole: Any = truth.layers[list(model.layers).index(block)]
        right.append(int((whole.attention.wq.weight == block.attention.wq.weight).all(1).sum()))

    for block in model.layers:
        block.register_forward_pre_hook(look)
    with record_events(model) as recording:
        next_token_loss(model, batches("cpu", 1)[0]).backward()
    return recording.trace(), right


def test_another_order_on_one_rank_computes_with_stitched_weights_in_silence(pool: labkit.WorkerPool) -> None:
    seen = pool.run(swapped)
    own_piece = 16 // pool.world_size
    for rank, (_, right) in seen.items():
        wrong_pieces = pool.world_size - 1 if rank == pool.world_size - 1 else 1
        assert right == [16 - wrong_pieces * own_piece] * 2 + [16]
    found = first_difference({f"rank {rank}": trace.order() for rank, (trace, _) in seen.items()})
    assert found == f"event 2 is 'U layers.0' in rank 0 and 'U layers.1' in rank {pool.world_size - 1}"


def test_the_composable_form_of_fsdp1_is_gone() -> None:
    with pytest.raises(ImportError):
        importlib.import_module("torch.distributed._composable.fully_shard")

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import labkit
from labkit.spmd.model.initialize import build_model, init_weights
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.training import train
from labkit.spmd.model.transformer import Block, ModelConfig, Transformer, next_token_loss
from labkit.spmd.shards.parity import compare
from labkit.spmd.shards.records import Parity
from labkit.spmd.shards.sharding import ShardingError, check_optimizer, shard_model
from labkit.spmd.shards.tables import shard_table
from tests.matrix import matrix

SMALL = ModelConfig(dim=16, num_layers=2, num_heads=4, hidden_dim=24, max_seq_len=32)


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def small_model(seed: int = 0) -> Transformer:
    return build_model(SMALL, seed=seed)


def refusal(model: nn.Module, **arguments: Any) -> str:
    """Return the message of the refusal, and require that the model is as whole as before."""
    before = [type(module) for module in model.modules()]
    with pytest.raises(ShardingError) as caught:
        shard_model(model, mesh_of_all(), **arguments)
    assert [type(module) for module in model.modules()] == before
    return str(caught.value)


def shard_by(blocks: Any) -> list[str]:
    model = shard_model(small_model(), mesh_of_all(), blocks=blocks)
    return [name for name, module in model.named_modules() if isinstance(module, torch.distributed.fsdp.FSDPModule)]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (Block, ["", "layers.0", "layers.1"]),
        ((Block,), ["", "layers.0", "layers.1"]),
        (
            lambda module: isinstance(module, nn.RMSNorm),
            ["", *(f"layers.{i}.{n}_norm" for i in (0, 1) for n in ("attention", "ffn")), "norm"],
        ),
    ],
    ids=["class", "classes", "predicate"],
)
def test_exactly_the_matching_modules_and_the_root_are_sharded(pool: labkit.WorkerPool, blocks: Any, expected: list[str]) -> None:
    assert sorted(pool.run(shard_by, blocks).same()) == sorted(expected)


def train_both(num_steps: int) -> tuple[list[float], list[float]]:
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    losses = []
    for sharded in (False, True):
        model: nn.Module = small_model()
        if sharded:
            model = shard_model(model, mesh_of_all(), blocks=Block)
        else:
            # The plain reference averages by hand what FSDP2 averages by reduce-scatter.
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(average)
        batches = BatchSampler(batch_size=8, seq_len=16, rank=rank, world_size=world_size)
        losses.append(train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, num_steps))
    return losses[0], losses[1]


def average(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    torch.distributed.all_reduce(parameter.grad)
    parameter.grad /= torch.distributed.get_world_size()


def test_a_sharded_model_trains_like_a_whole_one(pool: labkit.WorkerPool) -> None:
    plain, sharded = pool.run(train_both, 4).same()
    # Two ranks add two numbers, in one order; more ranks may add in another order than the reference.
    tolerance = 0.0 if pool.world_size == 2 else 1e-5
    assert sharded == pytest.approx(plain, rel=tolerance, abs=0.0)
    assert plain[-1] < plain[0]


def shard_on_meta() -> Parity:
    model = shard_model(build_model(SMALL, device="meta"), mesh_of_all(), blocks=Block)
    model.to_empty(device="cpu")
    init_weights(model, seed=4)
    assert model.head.weight is model.embed.weight
    return compare(model, small_model(seed=4))


def test_a_model_sharded_on_meta_gets_the_weights_of_the_whole_one(pool: labkit.WorkerPool) -> None:
    assert pool.run(shard_on_meta).same()


def tie_in_one_group() -> tuple[bool, list[float]]:
    model = shard_model(small_model(), mesh_of_all(), blocks=(nn.Embedding, nn.Linear))
    batches = BatchSampler(
        batch_size=8, seq_len=16, rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size()
    )
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        batches.position = 0  # the same batch again: its loss falls, whatever the text is
        losses += train(model, optimizer, batches, 1)
    same = model.head.weight is model.embed.weight
    return same, losses


def test_matching_modules_with_a_tied_weight_share_a_group(pool: labkit.WorkerPool) -> None:
    same, losses = pool.run(tie_in_one_group).same()
    assert same
    assert losses[1] < losses[0]


def keep_ignored() -> dict[str, bool]:
    model = small_model()
    frozen = set(model.layers[0].parameters())
    shard_model(model, mesh_of_all(), blocks=Block, ignored_params=frozen)
    return {record.name: record.is_distributed for record in shard_table(dict(model.named_parameters()))}


def test_ignored_parameters_stay_plain(pool: labkit.WorkerPool) -> None:
    distributed = pool.run(keep_ignored).same()
    assert {name for name, is_distributed in distributed.items() if not is_distributed} == {
        name for name in distributed if name.startswith("layers.0.")
    }


def refuse_no_match() -> str:
    return refusal(small_model(), blocks=nn.Conv2d)


def refuse_container() -> str:
    return refusal(small_model(), blocks=nn.ModuleList)


def refuse_half_of_a_tie() -> str:
    return refusal(small_model(), blocks=(Block, nn.Embedding))


def refuse_stranger() -> str:
    return refusal(small_model(), blocks=Block, ignored_params=small_model().parameters())


def refuse_optimizer() -> str:
    model = small_model()
    optimizer = torch.optim.AdamW(model.layers[1].parameters())
    text = refusal(model, blocks=Block)
    assert optimizer.param_groups
    return text


def refuse_second_sharding() -> str:
    model = shard_model(small_model(), mesh_of_all(), blocks=Block)
    return refusal(model, blocks=Block)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (refuse_no_match, "no module matches `blocks`"),
        (refuse_container, "no forward to gather for: layers"),
        (refuse_half_of_a_tie, "embed.weight and head.weight are one tied parameter"),
        (refuse_stranger, "20 of the 20 ignored parameters are not in this model"),
        (refuse_optimizer, "AdamW already holds 9 parameters"),
        (refuse_second_sharding, "already sharded: the model itself, layers.0, layers.1"),
    ],
)
def test_what_torch_gets_wrong_is_refused_and_nothing_changed(
    pool: labkit.WorkerPool, attempt: Callable[[], str], message: str
) -> None:
    assert message in pool.run(attempt).same()


def refuse_unequal_ranks(change: str) -> str:
    model = small_model()
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        if change == "one element of the last rank":
            if rank == torch.distributed.get_world_size() - 1:
                model.layers[1].attention.wq.weight[3, 5] += 1e-6
        elif rank == 0:
            weight = model.layers[1].attention.wq.weight
            weight.copy_(weight.flip(0))
    return refusal(model, blocks=Block)


@pytest.mark.parametrize("change", ["one element of the last rank", "the same values in another order"])
def test_ranks_with_different_weights_are_refused_by_name_on_every_rank(pool: labkit.WorkerPool, change: str) -> None:
    text = pool.run(refuse_unequal_ranks, change).same()
    assert "the ranks hold different values of layers.1.attention.wq.weight." in text


def accept_deleted_optimizer() -> int:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.itself = optimizer  # only the collector can free a cycle
    del optimizer
    shard_model(model, mesh_of_all(), blocks=Block)
    return sum(1 for _ in model.parameters())


def test_an_optimizer_that_was_deleted_is_no_obstacle(pool: labkit.WorkerPool) -> None:
    assert pool.run(accept_deleted_optimizer).same() == 20


def notice_stray_optimizer() -> tuple[str, list[float]]:
    stray = torch.optim.SGD(small_model().parameters(), lr=0.1)
    model = shard_model(small_model(), mesh_of_all(), blocks=Block)
    with pytest.raises(ShardingError) as caught:
        train(model, stray, BatchSampler(batch_size=8, seq_len=16), 1)
    check_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = next(BatchSampler(batch_size=4, seq_len=16))
    losses = []
    for _ in range(2):  # without the check nothing is raised and nothing is learned
        loss = next_token_loss(model, batch)
        loss.backward()
        stray.step()
        losses.append(loss.item())
    return str(caught.value), losses


def test_training_with_an_optimizer_of_other_tensors_is_refused(pool: labkit.WorkerPool) -> None:
    message, losses = pool.run(notice_stray_optimizer).same()
    assert "20 of the 20 tensors in SGD are not parameters of the model" in message
    assert losses[0] == losses[1]

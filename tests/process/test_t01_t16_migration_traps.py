"""Silent mistakes of torch when code moves from FSDP1 to FSDP2, and the safe way that notebook 03 shows.

Each test first shows the trap. If that part fails, torch has fixed it, and the trap can be removed from the notebook; the safe way
stays right. The traps of the optimizer's state are in test_t03_t17_optimizer_traps.py, those of saving in
test_t18_t40_saving_traps.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import labkit
from labkit import checkpoint
from labkit.checkpoint.errors import FQNMismatchError
from labkit.spmd.model.initialize import build_model, init_weights
from labkit.spmd.model.transformer import Block, ModelConfig, Transformer, next_token_loss
from labkit.spmd.shards.parity import compare
from labkit.spmd.shards.sharding import ShardingError, check_optimizer, shard_model
from labkit.spmd.trace.recorder import record_events
from tests.matrix import matrix

SMALL = ModelConfig(dim=16, num_layers=2, num_heads=2, hidden_dim=24, max_seq_len=16)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def world_mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def raw(model: Transformer, **options: Any) -> Transformer:
    """Shard the model with torch alone."""
    for block in model.layers:
        fully_shard(block, mesh=world_mesh(), **options)
    fully_shard(model, mesh=world_mesh())
    return model


def tokens() -> torch.Tensor:
    return torch.arange(9).view(1, 9)


def stitched() -> tuple[list[int], str, bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = raw(build_model(SMALL, seed=rank)).embed.weight.full_tensor()
    rows = len(whole) // size
    drawn = [build_model(SMALL, seed=seed).embed.weight for seed in range(size)]
    parts = [whole[place * rows : (place + 1) * rows] for place in range(size)]
    sources = [
        next(seed for seed, weight in enumerate(drawn) if torch.equal(part, weight[place * rows : (place + 1) * rows]))
        for place, part in enumerate(parts)
    ]
    try:
        shard_model(build_model(SMALL, seed=rank), world_mesh(), blocks=Block)
        refused = ""
    except ShardingError as error:
        refused = str(error)
    own = build_model(SMALL, seed=rank)
    with torch.no_grad():
        for tensor in (*own.parameters(), *own.buffers()):
            dist.broadcast(tensor, src=0)
    whole = shard_model(own, world_mesh(), blocks=Block).embed.weight.full_tensor()
    return sources, refused, torch.equal(whole, drawn[0])


def test_t01_each_rank_keeps_its_rows_of_its_own_model_unless_one_source_is_broadcast(pool: labkit.WorkerPool) -> None:
    for sources, refused, right in pool.run(stitched).values():
        assert sources == list(range(pool.world_size))  # the trap: all from rank 0 is right
        assert "different values" in refused
        assert right


def early_optimizer() -> tuple[bool, str, bool]:
    model = build_model(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    raw(model)
    before = model.embed.weight.full_tensor().clone()
    next_token_loss(model, tokens()).backward()
    optimizer.step()
    unmoved = torch.equal(model.embed.weight.full_tensor(), before)
    try:
        check_optimizer(model, optimizer)
        refused = ""
    except ShardingError as error:
        refused = str(error)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return unmoved, refused, torch.equal(model.embed.weight.full_tensor(), before)


def test_t02_an_optimizer_built_before_sharding_moves_nothing_and_is_refused_here(pool: labkit.WorkerPool) -> None:
    for unmoved, refused, still_unmoved in pool.run(early_optimizer).values():
        assert unmoved  # the trap
        assert "not parameters of the model" in refused
        assert not still_unmoved


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.seen: tuple[torch.dtype, ...] = ()
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.seen = x.dtype, positions.dtype, self.table.dtype  # type: ignore[union-attr]
        return x * self.weight


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = Inner(), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.weight, torch.full((8,), 1000.1))


def casts() -> list[tuple[torch.dtype, ...]]:
    low = {"param_dtype": torch.bfloat16}
    old = FSDP(
        Outer(),
        auto_wrap_policy=ModuleWrapPolicy({Inner}),
        mixed_precision=MixedPrecision(**low),
        device_id=CPU,
        use_orig_params=True,
    )
    old(torch.ones(8))
    seen = [old.module.inner.module.seen]
    for more in ({}, {"cast_forward_inputs": False}):
        new = Outer()
        fully_shard(new.inner, mesh=world_mesh(), mp_policy=MixedPrecisionPolicy(**low, **more))
        fully_shard(new, mesh=world_mesh(), mp_policy=MixedPrecisionPolicy(**low))
        new(torch.ones(8))
        seen.append(new.inner.seen)
    return seen


def test_t04_fsdp2_casts_the_inputs_of_every_module_and_fsdp1_those_of_the_root(pool: labkit.WorkerPool) -> None:
    low, high = torch.bfloat16, torch.float32
    for old, new, told in pool.run(casts).values():
        assert old == (low, high, high)
        assert new == (low, low, high)  # the trap: the positions have lost their last digits
        assert told == (low, high, high)


class NormedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def batch_norm() -> tuple[str, bool]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(NormedNet(), mesh=world_mesh(), mp_policy=policy)
    try:
        model(torch.ones(4, 4))
        said = ""
    except RuntimeError as error:
        said = str(error)
    apart = NormedNet()
    fully_shard(apart.norm, mesh=world_mesh(), mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32))
    fully_shard(
        apart.linear, mesh=world_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    )
    return said, bool(apart(torch.ones(4, 4)).isfinite().all())


def test_t04_buffers_stay_in_float32_so_a_batch_norm_needs_a_unit_of_its_own(pool: labkit.WorkerPool) -> None:
    for said, right in pool.run(batch_norm).values():
        assert "BFloat16" in said or "mixed dtype" in said  # the trap
        assert right


def only_the_root() -> tuple[int, int, int, str]:
    peaks = []
    for model in (fully_shard(build_model(SMALL), mesh=world_mesh()), raw(build_model(SMALL))):
        next_token_loss(model, tokens()).backward()
        with record_events(model) as recording:
            next_token_loss(model, tokens()).backward()
        peaks.append(recording.trace().peak_live_bytes)
    whole = sum(parameter.numel() * 4 for parameter in build_model(SMALL).parameters())
    try:
        shard_model(build_model(SMALL), world_mesh(), blocks=nn.Dropout)
        refused = ""
    except ShardingError as error:
        refused = str(error)
    return peaks[0], peaks[1], whole, refused


def test_t05_only_the_root_sharded_gathers_the_whole_model_at_once_and_is_refused_here(pool: labkit.WorkerPool) -> None:
    for root_only, by_block, whole, refused in pool.run(only_the_root).values():
        assert root_only >= whole  # the trap
        assert by_block <= root_only
        assert "one group" in refused


def list_of_blocks() -> str:
    with pytest.raises(ValueError, match="forward"):
        fully_shard(build_model(SMALL).layers, mesh=world_mesh())
    with pytest.raises(ShardingError, match="containers") as caught:
        shard_model(build_model(SMALL), world_mesh(), blocks=nn.ModuleList)
    return str(caught.value)


def test_t05_a_list_of_modules_has_no_forward_and_is_refused_by_name(pool: labkit.WorkerPool) -> None:
    assert "layers" in pool.run(list_of_blocks)[0]


def past_the_hooks() -> tuple[str, str, bool]:
    model = raw(build_model(SMALL))
    with pytest.raises(RuntimeError) as skipped:
        model.forward(tokens())
    with pytest.raises(AssertionError) as copied:
        copy.deepcopy(model)
    twin = raw(build_model(SMALL, seed=1))
    twin.load_state_dict(model.state_dict())
    return str(skipped.value), str(copied.value), torch.equal(model(tokens()), twin(tokens()))


def test_t06_forward_past_the_hooks_and_deepcopy_fail_and_a_state_dict_copies(pool: labkit.WorkerPool) -> None:
    for skipped, copied, same in pool.run(past_the_hooks).values():
        assert "mixed torch.Tensor and DTensor" in skipped
        assert "deepcopy" in copied
        assert same


def between() -> tuple[set[str], set[str], set[str]]:
    model = raw(build_model(SMALL), reshard_after_forward=False)
    loss = next_token_loss(model, tokens())
    named = {type(parameter).__name__ for block in model.layers for parameter in block.parameters()}
    by_state = {type(value).__name__ for name, value in model.state_dict().items() if not name.startswith("rope")}
    loss.backward()
    return named, by_state, {type(parameter).__name__ for parameter in model.parameters()}


def test_t07_between_forward_and_backward_parameters_are_plain_and_the_state_dict_is_sharded(pool: labkit.WorkerPool) -> None:
    for named, by_state, after in pool.run(between).values():
        assert named == {"Parameter"}  # the trap
        assert by_state == {"DTensor"}
        assert after == {"DTensor"}


def untied() -> tuple[bool, bool, int]:
    loose = build_model(SMALL, device="meta").to_empty(device="cpu")
    tied = loose.head.weight is loose.embed.weight
    init_weights(loose, 3)
    sharded = shard_model(loose, world_mesh(), blocks=Block)
    compare(sharded, build_model(SMALL, seed=3)).require()
    return tied, sharded.head.weight is sharded.embed.weight, len(list(sharded.parameters()))


def test_t08_to_empty_unties_and_init_weights_ties_again(pool: labkit.WorkerPool) -> None:
    for tied, tied_again, num_parameters in pool.run(untied).values():
        assert not tied  # the trap
        assert tied_again
        assert num_parameters == 2 + 9 * SMALL.num_layers


def edits() -> tuple[bool, bool]:
    model = raw(build_model(SMALL))
    with torch.no_grad():
        model.norm.weight.full_tensor().fill_(5.0)
        lost = bool((model.norm.weight.full_tensor() == 1.0).all())
        model.norm.weight.fill_(5.0)
    return lost, bool((model.norm.weight.full_tensor() == 5.0).all())


def test_t09_edits_of_a_gathered_tensor_are_lost_and_those_of_the_dtensor_stay(pool: labkit.WorkerPool) -> None:
    assert pool.run(edits).same() == (True, True)


def test_t09_gathering_on_one_rank_only_hangs(pool: labkit.WorkerPool) -> None:
    with pytest.raises(labkit.RunTimeoutError):
        pool.run(gather_on_rank_0, timeout_s=3)
    assert pool.run(edits).same() == (True, True)  # and the ranks go on


def gather_on_rank_0() -> None:
    model = raw(build_model(SMALL))
    if dist.get_rank() == 0:
        model.norm.weight.full_tensor()


def full_moments() -> tuple[list[float], list[float], list[float]]:
    model = FSDP(build_model(SMALL), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=CPU, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    next_token_loss(model, tokens()).backward()
    optimizer.step()

    def largest(kind: StateDictType, *configs: Any) -> list[float]:
        with FSDP.state_dict_type(model, kind, *configs):
            state = FSDP.optim_state_dict(model, optimizer)["state"]["layers.0.feed_forward.w1.weight"]
        values = [state[name] for name in ("exp_avg", "exp_avg_sq")]
        found = []
        for value in values:
            local = [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]
            peak = torch.tensor(max((float(part.abs().max()) for part in local if part.numel()), default=0.0))
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
            found.append(float(peak))
        return found

    full = StateDictType.FULL_STATE_DICT
    weights = FullStateDictConfig(offload_to_cpu=False)
    return (
        largest(full, weights, FullOptimStateDictConfig()),
        largest(full, weights, FullOptimStateDictConfig(offload_to_cpu=False)),
        largest(StateDictType.SHARDED_STATE_DICT),
    )


def test_t10_the_full_form_mixes_up_the_moments_on_a_cpu_by_default_and_two_others_do_not(pool: labkit.WorkerPool) -> None:
    for by_default, without_offload, sharded in pool.run(full_moments).values():
        assert by_default[0] == by_default[1]  # the trap
        assert without_offload == sharded
        assert sharded[0] > 10 * sharded[1]


def alike() -> tuple[int, bool]:
    size = dist.get_world_size()
    layer = fully_shard(nn.Linear(8, 4 * size, bias=False, device="meta"), mesh=world_mesh())
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    nn.init.normal_(layer.weight)
    shards = layer.weight.full_tensor().chunk(size)
    model = raw(build_model(SMALL, device="meta"))
    model.to_empty(device="cpu")
    init_weights(model, 3)
    return sum(torch.equal(shard, shards[0]) for shard in shards), bool(compare(model, build_model(SMALL, seed=3)))


def test_t12_a_dtensor_on_a_cpu_gives_all_shards_the_same_numbers_and_init_weights_does_not(pool: labkit.WorkerPool) -> None:
    num_alike, right = pool.run(alike).same()
    assert num_alike == pool.world_size  # the trap: 1 is right
    assert right


def swapped() -> tuple[bool, bool, bool]:
    attention = raw(build_model(SMALL)).layers[0].attention
    model = attention
    q, k = attention.wq.weight, attention.wk.weight
    assert isinstance(q, DTensor)
    first = torch.optim.AdamW([q, k])
    q.grad, k.grad = torch.ones_like(q), 2 * torch.ones_like(k)
    first.step()

    def same(one: Any, other: Any) -> bool:
        return torch.equal(one["exp_avg"].full_tensor(), other["exp_avg"].full_tensor())

    second, third = torch.optim.AdamW([k, q]), torch.optim.AdamW([k, q])
    second.load_state_dict(first.state_dict())
    set_optimizer_state_dict(model, third, copy.deepcopy(get_optimizer_state_dict(model, first)))
    return same(second.state[q], first.state[q]), same(second.state[q], first.state[k]), same(third.state[q], first.state[q])


def test_t03_by_position_sharded_moments_swap_and_by_name_they_do_not(pool: labkit.WorkerPool) -> None:
    own, others, by_name = pool.run(swapped).same()
    assert not own  # the trap
    assert others
    assert by_name


def test_t16_the_converter_there_and_back_loses_the_moments_and_migrate_wants_names(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "old.pt")
    torch_save_to_dcp(tmp_path / "old.pt", tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "back.pt")
    theirs = torch.optim.AdamW(model.parameters())
    theirs.load_state_dict(torch.load(tmp_path / "back.pt", weights_only=True)["optimizer"])
    assert model.weight not in theirs.state  # the trap
    with pytest.raises(FQNMismatchError, match="by position"):
        checkpoint.migrate(tmp_path / "old.pt", tmp_path / "refused")
    checkpoint.migrate(tmp_path / "old.pt", tmp_path / "new", model=model)
    ours = torch.optim.AdamW(model.parameters())
    checkpoint.load(tmp_path / "new", {"model": model, "optimizer": ours})
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(ours.state[model.weight][name], optimizer.state[model.weight][name])

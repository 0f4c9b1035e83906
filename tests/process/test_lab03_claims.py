"""Claims of notebook 03 about torch. If a new torch fails one of these tests, the sentence in the notebook is wrong too."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import labkit
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.training import train
from labkit.spmd.model.transformer import Block
from labkit.spmd.shards.flat_parameters import flat_shares
from labkit.spmd.shards.records import FlatShare
from labkit.spmd.shards.sharding import shard_model
from tests.matrix import matrix

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "03_fsdp1_to_fsdp2.ipynb"
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def old(seed: int = 0, **options: Any) -> FSDP:
    options = {"device_id": CPU, "use_orig_params": True, **options}
    return FSDP(build_model(seed=seed), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def new(seed: int = 0) -> nn.Module:
    return shard_model(build_model(seed=seed), init_device_mesh("cpu", (dist.get_world_size(),)), blocks=Block)


def batches(position: int = 0) -> BatchSampler:
    sampler = BatchSampler(batch_size=12, seq_len=16, rank=dist.get_rank(), world_size=dist.get_world_size())
    sampler.position = position
    return sampler


def without_device_id() -> str:
    with pytest.raises(RuntimeError) as caught:
        FSDP(build_model())
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no accelerator")
def test_on_a_cpu_fsdp1_needs_a_device_id(pool: labkit.WorkerPool) -> None:
    assert "accelerator" in pool.run(without_device_id)[0]


def shares_of(use_orig_params: bool) -> list[FlatShare]:
    return flat_shares(old(use_orig_params=use_orig_params))


def test_a_flat_parameter_is_cut_within_a_row_and_most_ranks_have_nothing_of_most_parameters(pool: labkit.WorkerPool) -> None:
    found = pool.run(shares_of, True)
    held = {rank: {share.name: share.numel for share in listed if share.unit == "layers.0"} for rank, listed in found.items()}
    assert len(held[0]) == 9
    sizes = [sum(shares.values()) for shares in held.values()]
    assert len(set(sizes)) == 1  # one equal piece per rank
    assert sum(sizes) == sum(parameter.numel() for parameter in build_model().layers[0].parameters())
    if pool.world_size == 4:
        assert held[0]["layers.0.attention.wo.weight"] % 64  # rows have 64 elements
        empty = sum(numel == 0 for shares in held.values() for numel in shares.values())
        assert empty > 4 * 9 / 2
    with pytest.raises(labkit.RankFailedError, match="use_orig_params=True"):
        pool.run(shares_of, False)


def both_go_on(folder: str) -> tuple[list[float], list[float]]:
    source = new()
    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-2)
    train(source, optimizer, batches(), 2)
    weights, moments = get_state_dict(source, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    losses = []
    for model in (old(seed=1), new(seed=1)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        losses.append(train(model, optimizer, batches(2), 3))
    return losses[0], losses[1]


def test_fsdp1_goes_on_from_what_fsdp2_wrote_bit_for_bit_on_two_ranks(pool: labkit.WorkerPool, tmp_path: Path) -> None:
    by_old, by_new = pool.run(both_go_on, str(tmp_path), timeout_s=90).same()
    if pool.world_size == 2:
        assert by_old == by_new
    assert by_old == pytest.approx(by_new, rel=1e-6)


def names_by_type() -> dict[str, list[str]]:
    model = old()
    found = {}
    for kind in ("FULL", "SHARDED", "LOCAL"):
        with FSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
            found[kind] = sorted(model.state_dict())
    return found


def test_only_the_local_type_has_the_names_of_fsdp1_in_it(pool: labkit.WorkerPool) -> None:
    found = pool.run(names_by_type)[0]
    clean = sorted(build_model().state_dict())
    assert found["FULL"] == found["SHARDED"] == clean
    assert "layers.0._flat_param" in found["LOCAL"]


def around_the_class() -> tuple[bool, bool, int, int]:
    model = new()
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    batch = next(batches())
    for _ in range(2):
        model(batch[:, :-1]).sum().backward()
    unreduced = sum(parameter.grad is None for parameter in model.parameters())
    model.set_requires_gradient_sync(True)
    model(batch[:, :-1]).sum().backward()
    reduced = sum(parameter.grad is not None for parameter in model.parameters())
    return hasattr(model, "no_sync"), hasattr(model, "clip_grad_norm_"), unreduced, reduced


def test_fsdp2_has_neither_no_sync_nor_its_own_clipping_and_its_switch_stays_set(pool: labkit.WorkerPool) -> None:
    num_parameters = len(list(build_model().parameters()))
    assert pool.run(around_the_class)[0] == (False, False, num_parameters, num_parameters)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self) -> torch.Tensor:
        return self.a.sum() + 2 * self.b.sum()


def test_after_an_empty_group_lost_its_options_the_next_step_stops_with_a_key_error() -> None:
    def grouped(model: Two) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": []}, {"params": [model.a]}, {"params": [model.b]}])

    model = Two()
    optimizer = grouped(model)
    model().backward()
    optimizer.step()
    restored = grouped(model)
    set_optimizer_state_dict(model, restored, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    with pytest.raises(KeyError):
        restored.step()


@pytest.mark.parametrize(
    ("scheduler", "without", "never_stopped"),
    [
        # One that multiplies goes on from the restored rate, by the factor of its first epoch.
        (lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10), 0.72, 0.7),
        # One that computes from the epoch jumps back.
        (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / 10), 0.9, 0.7),
    ],
    ids=["multiplies", "computes_from_the_epoch"],
)
def test_without_its_own_entry_a_scheduler_goes_on_in_the_wrong_place(
    scheduler: Callable[[torch.optim.Optimizer], Any], without: float, never_stopped: float
) -> None:
    def epoch(model: Two, optimizer: torch.optim.Optimizer, schedule: Any) -> float:
        model().backward()
        optimizer.step()
        schedule.step()
        return float(optimizer.param_groups[0]["lr"])

    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = scheduler(optimizer)
    for _ in range(2):
        epoch(model, optimizer, schedule)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    resumed = torch.optim.SGD(model.parameters(), lr=1.0)
    fresh = scheduler(resumed)
    set_optimizer_state_dict(model, resumed, saved)
    assert resumed.param_groups[0]["lr"] == pytest.approx(0.8)
    assert epoch(model, resumed, fresh) == pytest.approx(without)
    assert epoch(model, optimizer, schedule) == pytest.approx(never_stopped)


def test_the_notebook_s_exact_sentences_are_still_in_it() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for claim in (
        "On a CPU FSDP1 needs the argument `device_id`",
        "through the middle of a matrix, and with four ranks even of a row",
        "most of these ranks have nothing of most parameters",
        "With two ranks all are equal bit for bit",
        "the next step stops with a `KeyError`",
        "A schedule that multiplies goes on from the restored rate, in the wrong place",
        "one that computes from the epoch jumps back",
        "`model.set_requires_gradient_sync(False)`, which stays set",
    ):
        assert claim in text, f"the notebook no longer says {claim!r}; drop or change its test in this file"

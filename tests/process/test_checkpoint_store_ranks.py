"""Saving and loading by several ranks: every kind of sharding, other world sizes, values per rank, failures of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from labkit import checkpoint
from labkit.checkpoint import PerRank, Reader, open_checkpoint
from labkit.checkpoint.errors import CheckpointWriteError, FQNMismatchError, RankDivergenceError
from labkit.checkpoint.index import manifest
from tests.matrix import matrix
from tests.process.checkpoint_models import Net, adam, fsdp1, fsdp2, train, two_d
from tests.process.checkpoint_ranks import Launcher, launcher_fixture  # noqa: F401


def build(kind: str, seed: int = 0) -> torch.nn.Module:
    world_size = dist.get_world_size()
    if kind == "plain":
        return Net(seed)
    if kind == "ddp":
        return DistributedDataParallel(Net(seed))
    if kind == "fsdp2":
        return fsdp2(Net(seed))
    if kind == "hsdp":
        return fsdp2(Net(seed), init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")))
    if kind == "2d":
        return two_d(Net(seed), world_size // 2, 2)
    return fsdp1(Net(seed), use_orig_params=kind == "fsdp1")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and moments by name, whole, the same on every rank."""
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model):
            found = {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}
        return {"weights": found}
    names = {p: name.removeprefix("module.") for name, p in model.named_parameters()}
    weights = {name: whole(p) for p, name in names.items()}
    moments = {f"{names[p]}.{piece}": whole(value) for p, state in optimizer.state.items() for piece, value in state.items()}
    return {"weights": weights, "moments": moments}


def first_run(rank: int, kind: str, folder: str) -> Any:
    model = build(kind)
    optimizer = adam(model)
    train(model, optimizer, 2)
    checkpoint.save(
        folder, {"model": model, "optimizer": optimizer, "at": 2, "mine": PerRank({"rank": rank, "t": torch.tensor(rank)})}, 2
    )
    saved = everything(model, optimizer)
    losses = train(model, optimizer, 2, start=2)
    return saved, losses, everything(model, optimizer)


def second_run(rank: int, kind: str, folder: str, per_rank: bool) -> Any:
    model = build(kind, seed=5)
    optimizer = adam(model)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "at": 0}
    if per_rank:
        state["mine"] = PerRank({"rank": -1, "t": torch.tensor(-1)})
    checkpoint.load(folder, state, ignore=[] if per_rank else ["mine.*"])
    loaded = everything(model, optimizer)
    mine = state["mine"].value if per_rank else None
    return loaded, train(model, optimizer, 2, start=2), everything(model, optimizer), state["at"], mine


def same(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names that differ, over the groups that both sides report."""
    wrong = []
    for group in left.keys() & right.keys():
        assert left[group].keys() == right[group].keys()
        wrong += [name for name in left[group] if not torch.equal(left[group][name], right[group][name])]
    return wrong


@pytest.mark.parametrize(
    ("kind", "world_size", "other", "other_size"),
    [
        ("fsdp2", 3, "plain", 1),
        ("2d", 4, "fsdp2", 2),
        *matrix(
            ("fsdp1_flat", 2, "fsdp2", 3),
            ("fsdp2", 2, "fsdp2", 2),
            ("plain", 1, "fsdp2", 2),
            ("ddp", 2, "fsdp2", 2),
            ("fsdp2", 2, "2d", 4),
            ("hsdp", 4, "fsdp2", 3),
            ("fsdp1", 2, "fsdp2", 2),
            ("fsdp1", 2, "fsdp1", 2),
            ("fsdp2", 2, "fsdp1", 2),
        ),
    ],
)
def test_weights_moments_and_the_steps_after_survive_another_sharding(
    launcher: Launcher,
    tmp_path: Path,
    kind: str,
    world_size: int,
    other: str,
    other_size: int,
) -> None:
    saved, losses, after = launcher.run(first_run, world_size, tmp_path, kind, str(tmp_path / "store"))[0]
    same_size = world_size == other_size
    results = launcher.run(second_run, other_size, tmp_path, other, str(tmp_path / "store"), same_size)
    loaded, other_losses, other_after, at, _ = results[0]
    assert at == 2
    assert loaded["weights"]
    assert same(saved, loaded) == []
    if same_size:
        assert [result[4] for result in results] == [{"rank": rank, "t": torch.tensor(rank)} for rank in range(world_size)]
    if world_size == other_size == 2:  # gloo adds two ranks' numbers in the same order for every sharding
        assert other_losses == losses
        assert same(after, other_after) == []


def diverging(rank: int, folder: str) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(rank)
    model = fsdp2(Net(seed=rank), mesh)
    texts = []
    for state in (
        {"loss": torch.tensor(float(rank))},
        {"n": rank},
        {"model": model},
        {"t": torch.zeros(2 + rank)},
    ):
        with pytest.raises(RankDivergenceError) as caught:
            checkpoint.save(folder, state, 1)
        texts.append(str(caught.value))
    assert manifest.complete_steps(Path(folder)) == []
    return "\n".join(texts)


UNEVEN = (7, 13)


def sharded_linear(rows: int) -> tuple[torch.Tensor, torch.nn.Module]:
    """A layer that TP cuts over two ranks and fully_shard over three; and its whole weight."""
    torch.manual_seed(rows)
    layer = torch.nn.Sequential(torch.nn.Linear(8, rows))
    whole_weight = layer[0].weight.detach().clone()
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
    return whole_weight, fully_shard(layer, mesh=mesh["dp"])


def save_uneven(rank: int, folder: str, rows: int) -> str:
    whole_weight, layer = sharded_linear(rows)
    alone = {"model": {"0.weight": torch.zeros(rows, 8)}}
    try:
        dcp.save({"model": layer.state_dict()}, checkpoint_id=f"{folder}/torch")
        dcp.load(alone, checkpoint_id=f"{folder}/torch", no_dist=True)
        torchs = "" if torch.equal(alone["model"]["0.weight"], whole_weight) else "other values"
    except BaseException as error:  # CheckpointException is one
        torchs = str(error)
    checkpoint.save(f"{folder}/labkit", {"model": layer}, 1)
    with Reader(open_checkpoint(f"{folder}/labkit")) as reader:
        assert torch.equal(reader.tensor("model.0.weight"), whole_weight)
    weight = layer.state_dict()["0.weight"]
    before = weight.to_local().clone()
    weight.to_local().zero_()
    checkpoint.load(f"{folder}/labkit", {"model": layer})
    assert torch.equal(weight.to_local(), before)
    return torchs


@pytest.mark.parametrize("rows", UNEVEN)
def test_uneven_rows_over_three_ranks_of_fully_shard_and_two_of_tp_come_back_where_dcp_fails(
    launcher: Launcher, tmp_path: Path, rows: int
) -> None:
    """If this fails because torch is right, torch has fixed its arithmetic of boxes, and labkit's own can go."""
    assert all(launcher.run(save_uneven, 6, tmp_path, str(tmp_path), rows)), "torch is right"


def test_values_that_differ_between_ranks_are_refused_by_name_on_every_rank(launcher: Launcher, tmp_path: Path) -> None:
    first, second = launcher.run(diverging, 2, tmp_path, str(tmp_path / "store"))
    assert first == second
    for words in (
        "loss differs between rank 0 and rank 1",
        "n differs",
        "model.embed.weight differs between rank 0 and rank 1",
        "t has another shape",
    ):
        assert words in first
    assert "PerRank" in first


def pipeline(rank: int, folder: str) -> Any:
    """Each rank has entries of its own, as the stages of a pipeline do."""
    checkpoint.save(folder, {f"stage{rank}": {"w": torch.full((2,), float(rank)), "note": f"of {rank}"}}, 1)
    state = {f"stage{rank}": {"w": torch.zeros(2), "note": ""}}
    with pytest.raises(FQNMismatchError):
        checkpoint.load(folder, state)
    checkpoint.load(folder, state, ignore=[f"stage{1 - rank}.*"])
    return state[f"stage{rank}"]["w"].tolist(), state[f"stage{rank}"]["note"]


def test_entries_that_only_some_ranks_have_are_all_saved(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.run(pipeline, 2, tmp_path, str(tmp_path / "store")) == [([0.0, 0.0], "of 0"), ([1.0, 1.0], "of 1")]


def failing_rank(rank: int, folder: str, threads: int) -> tuple[str, list[int]]:
    checkpoint.save(folder, {"a": torch.ones(2)}, 1)
    model = fsdp2(Net())
    if rank == 1:
        from labkit.checkpoint.write import dcp_writer

        def fail(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        dcp_writer.HashedFile.write = fail  # type: ignore[method-assign]
    with pytest.raises(CheckpointWriteError) as caught:
        checkpoint.save(folder, {"model": model}, 2, keep=1, threads=threads)
    dist.barrier()
    state = {"a": torch.zeros(2)}
    assert checkpoint.load(folder, state).step == 1
    return str(caught.value), manifest.complete_steps(Path(folder))


@pytest.mark.parametrize("threads", [1, 2])
def test_one_rank_that_cannot_write_fails_the_save_on_all_and_the_last_step_stays(
    launcher: Launcher, tmp_path: Path, threads: int
) -> None:
    for text, steps in launcher.run(failing_rank, 2, tmp_path, str(tmp_path / "store"), threads):
        assert "rank 1: OSError: [Errno 28] No space left" in text
        assert steps == [1]


def asynchronous(rank: int, folder: str) -> list[float]:
    model = fsdp2(Net())
    optimizer = adam(model)
    for number in (1, 2, 3):
        train(model, optimizer, 1, start=number)
        pending = checkpoint.save_async(folder, {"model": model, "optimizer": optimizer}, number, keep=2)
        expected = everything(model, optimizer)
        train(model, optimizer, 1)
    pending.wait(60)
    other = fsdp2(Net(4))
    fresh = adam(other)
    assert checkpoint.load(folder, {"model": other, "optimizer": fresh}).step == 3
    assert same(expected, everything(other, fresh)) == []
    return manifest.complete_steps(Path(folder))


def own_folder(rank: int, folder: str) -> str:
    try:
        checkpoint.save(Path(folder) / f"machine-{rank}", {"model": build("fsdp2")}, 1)
    except CheckpointWriteError as error:
        return str(error)
    return "saved"


def test_a_directory_that_each_machine_has_of_its_own_is_refused_on_all_ranks(launcher: Launcher, tmp_path: Path) -> None:
    told = launcher.run(own_folder, 3, tmp_path, str(tmp_path))
    assert all("Rank 0 has made it, but ranks 1-2 cannot see it: all need one directory" in text for text in told)
    assert not list(tmp_path.rglob(manifest.MANIFEST_FILE))


def test_asynchronous_saves_hold_their_moment_while_training_goes_on(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.run(asynchronous, 2, tmp_path, str(tmp_path / "store")) == [[2, 3], [2, 3]]


def rng_round_trip(rank: int, folder: str) -> list[list[float]]:
    from labkit.checkpoint import Rng

    torch.manual_seed(100 + rank)
    checkpoint.save(folder, {"rng": PerRank(Rng())}, 1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(0)
    checkpoint.load(folder, {"rng": PerRank(Rng())})
    return [expected, torch.rand(3).tolist()]


def test_each_rank_gets_its_own_random_numbers_back(launcher: Launcher, tmp_path: Path) -> None:
    results = launcher.run(rng_round_trip, 2, tmp_path, str(tmp_path / "store"))
    assert all(expected == got for expected, got in results)
    assert results[0] != results[1]

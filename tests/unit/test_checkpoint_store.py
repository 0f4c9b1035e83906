"""Saving and loading by one process: refusals, retention, restoring."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from labkit import checkpoint
from labkit.checkpoint import PerRank, Rng
from labkit.checkpoint.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
    DtypeNarrowingError,
    FQNMismatchError,
    IncompleteCheckpointError,
)
from labkit.checkpoint.index import manifest


def training(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(
        [{"params": [], "lr": 0.5}, {"params": [model[0].weight], "lr": 0.01}, {"params": [*model[1:].parameters(), model[0].bias]}]
    )
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        "counters": {"tokens": 0, "history": [1, 2]},
        "ema": [torch.zeros(2), torch.ones(3)],
        "rng": PerRank(Rng()),
    }


def step(state: dict[str, Any], count: int = 1) -> list[float]:
    losses = []
    for _ in range(count):
        loss = state["model"](torch.randn(4, 3)).square().sum()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        losses.append(loss.item())
    return losses


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": value for name, value in state["model"].state_dict().items()}
    for index, value in enumerate(state["optimizer"].state.values()):
        found.update({f"{index}.{name}": item for name, item in value.items()})
    return {name: value.clone() for name, value in found.items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_training_goes_on_bit_for_bit_after_a_load(tmp_path: Path) -> None:
    first = training()
    step(first, 3)
    first["counters"]["tokens"] = 12
    checkpoint.save(tmp_path, first, 3)
    expected = step(first, 3)
    second = training(seed=9)
    report = checkpoint.load(tmp_path, second)
    assert (report.step, report.checked) == (3, True)
    assert second["counters"] == {"tokens": 12, "history": [1, 2]}
    assert [group["lr"] for group in second["optimizer"].param_groups] == [
        group["initial_lr"] * 0.5 for group in second["optimizer"].param_groups
    ]
    assert step(second, 3) == expected
    assert equal(tensors(first), tensors(second))


def test_only_the_newest_steps_are_kept_and_latest_is_the_highest_complete_one(tmp_path: Path) -> None:
    for number in (1, 2, 3, 10):
        checkpoint.save(tmp_path, {"a": torch.full((2,), float(number))}, number, keep=2)
    assert manifest.complete_steps(tmp_path) == [3, 10]
    assert manifest.latest(tmp_path).name == "step_00000010"
    state = {"a": torch.zeros(2)}
    checkpoint.load(tmp_path, state, step=3)
    assert state["a"].tolist() == [3.0, 3.0]
    with pytest.raises(CheckpointNotFoundError, match="Complete steps: 3, 10"):
        checkpoint.load(tmp_path, state, step=2)
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.save(tmp_path, state, 11, keep=0)


def test_a_step_without_a_manifest_does_not_count_and_the_next_save_replaces_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": torch.ones(2)}, 1)
    unfinished = tmp_path / "step_00000002"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"half")
    state = {"a": torch.zeros(2)}
    assert checkpoint.load(tmp_path, state).step == 1
    checkpoint.save(tmp_path, {"a": torch.full((2,), 2.0)}, 2)
    assert checkpoint.load(tmp_path, state).step == 2
    assert state["a"].tolist() == [2.0, 2.0]
    with pytest.raises(CheckpointExistsError, match="step 2 already exists and is complete"):
        checkpoint.save(tmp_path, state, 2)


def test_an_empty_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="no complete step"):
        checkpoint.load(tmp_path, {"a": torch.zeros(1)})


def test_a_failing_save_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, {"a": torch.ones(2)}, 1)
    full = OSError(28, "No space left on device")

    def fail(*_: Any) -> int:
        raise full

    for threads in (1, 3):
        with monkeypatch.context() as patch:
            patch.setattr("labkit.checkpoint.write.dcp_writer.HashedFile.write", fail)
            with pytest.raises(CheckpointWriteError, match="No space left"):
                checkpoint.save(tmp_path, {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}, 2, threads=threads)
    assert manifest.complete_steps(tmp_path) == [1]
    state = {"a": torch.zeros(2)}
    assert checkpoint.load(tmp_path, state).step == 1


def test_what_does_not_read_back_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = manifest.hash_file

    def flipped(path: Path, **options: Any) -> manifest.FileSum:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        return original(path, **options)

    monkeypatch.setattr(manifest, "hash_file", flipped)
    with pytest.raises(CheckpointWriteError, match="does not read back"):
        checkpoint.save(tmp_path, {"a": torch.ones(2)}, 1)
    assert manifest.complete_steps(tmp_path) == []


def test_threads_write_several_files_that_load_as_one(tmp_path: Path) -> None:
    state = {f"t{index}": torch.full((index + 1,), float(index)) for index in range(7)}
    directory = checkpoint.save(tmp_path, {**state, "n": 3}, 1, threads=3)
    assert len(list(directory.glob("*.distcp"))) == 3
    target = {key: torch.zeros_like(value) for key, value in state.items()} | {"n": 0}
    checkpoint.load(tmp_path, target)
    assert target.pop("n") == 3
    assert equal(target, state)


def saved(folder: Path, **values: Any) -> Path:
    checkpoint.save(folder, values, 1)
    return folder


def test_missing_and_unexpected_names_are_both_reported_and_nothing_changes(tmp_path: Path) -> None:
    saved(tmp_path, a=torch.ones(2), b=torch.ones(2), c=1)
    state = {"a": torch.zeros(2), "z": torch.zeros(2), "y": 5}
    with pytest.raises(FQNMismatchError) as caught:
        checkpoint.load(tmp_path, state)
    assert set(caught.value.missing) == {"z", "y"}
    assert set(caught.value.unexpected) == {"b", "c"}
    assert state["a"].tolist() == [0.0, 0.0]
    report = checkpoint.load(tmp_path, state, ignore=["z", "y", "b", "c"])
    assert report.ignored == ("b", "c", "y", "z")
    assert state["a"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (4,), (), (2, 2)])
def test_a_shape_that_differs_is_refused_also_where_it_would_broadcast(tmp_path: Path, shape: tuple[int, ...]) -> None:
    saved(tmp_path, a=torch.ones(1))
    state = {"a": torch.zeros(shape)}
    with pytest.raises(CheckpointMismatchError, match=r"a has shape \(1,\) in the checkpoint and"):
        checkpoint.load(tmp_path, state)
    assert not state["a"].any()


def test_a_narrowing_dtype_is_refused_and_overflow_also_when_it_is_asked_for(tmp_path: Path) -> None:
    saved(tmp_path, a=torch.tensor([70000.0, 1.0]))
    state = {"a": torch.zeros(2, dtype=torch.float16)}
    with pytest.raises(DtypeNarrowingError, match=r"a is torch.float32 in the checkpoint and torch.float16 here"):
        checkpoint.load(tmp_path, state)
    with pytest.raises(DtypeNarrowingError, match="1 finite values become inf"):
        checkpoint.load(tmp_path, state, narrowing=True)
    wide = {"a": torch.zeros(2, dtype=torch.float64)}
    checkpoint.load(tmp_path, wide)
    assert wide["a"].tolist() == [70000.0, 1.0]


def test_a_flipped_bit_a_foreign_file_and_a_cut_file_are_named_and_nothing_changes(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    saved(one, a=torch.arange(100.0))
    saved(two, a=torch.arange(100.0) * 2)
    file = one / "step_00000001/__0_0.distcp"
    good = file.read_bytes()
    state = {"a": torch.zeros(100)}
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 4
    for data, error in [
        (bytes(flipped), CorruptCheckpointError),
        ((two / "step_00000001/__0_0.distcp").read_bytes(), CorruptCheckpointError),
        (good[:-1], IncompleteCheckpointError),
    ]:
        file.write_bytes(data)
        with pytest.raises(error, match=r"__0_0\.distcp"):
            checkpoint.load(one, state)
        assert not state["a"].any()
    file.unlink()
    with pytest.raises(IncompleteCheckpointError, match="missing"):
        checkpoint.load(one, state)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    saved(tmp_path, a=torch.ones(2))
    path = tmp_path / "step_00000001/manifest.json"
    body = json.loads(path.read_text())
    body["world_size"] = 7
    path.write_text(json.dumps(body))
    with pytest.raises(CorruptCheckpointError, match="its own hash"):
        checkpoint.load(tmp_path, {"a": torch.zeros(2)})
    path.write_text("{")
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path, {"a": torch.zeros(2)})


def test_reading_an_optimizer_changes_nothing_in_it(tmp_path: Path) -> None:
    fresh = training()
    before = copy.deepcopy(fresh["optimizer"].state_dict())
    checkpoint.save(tmp_path, fresh, 1)
    assert fresh["optimizer"].state_dict() == before
    assert not fresh["optimizer"].state
    checkpoint.load(tmp_path, fresh)
    assert not fresh["optimizer"].state


def test_a_reordered_optimizer_gets_its_moments_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(index + 1))
    optimizer.step()
    checkpoint.save(tmp_path, {"m": model, "o": optimizer}, 1)
    other = copy.deepcopy(model)
    reordered = torch.optim.AdamW(list(other.parameters())[::-1])
    checkpoint.load(tmp_path, {"m": other, "o": reordered})
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(reordered.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])


def test_an_optimizer_of_other_parameters_or_other_groups_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, {"m": model, "o": torch.optim.SGD(model.parameters())}, 1)
    with pytest.raises(FQNMismatchError, match="optimizer group entry of bias"):
        checkpoint.load(tmp_path, {"m": model, "o": torch.optim.SGD([model.weight])})
    split = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}])
    with pytest.raises(FQNMismatchError, match="divide the parameters in another way"):
        checkpoint.load(tmp_path, {"m": model, "o": split})
    dead = torch.optim.SGD(copy.deepcopy(model).parameters())
    with pytest.raises(FQNMismatchError, match="Build the optimizer after fully_shard"):
        checkpoint.save(tmp_path, {"m": model, "o": dead}, 2)


def test_state_numbered_by_position_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, tmp_path / "x.pt")
    with pytest.raises(FQNMismatchError, match="without parameter names"):
        checkpoint.load(tmp_path / "x.pt", {"m": model, "o": optimizer})


def test_tied_weights_stay_one_storage_after_a_load(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    checkpoint.save(tmp_path, {"m": model}, 1)
    with torch.no_grad():
        model["embed"].weight.zero_()
    checkpoint.load(tmp_path, {"m": model})
    assert model["head"].weight is model["embed"].weight
    assert model["head"].weight.any()


def test_an_asynchronous_save_holds_the_values_of_its_moment(tmp_path: Path) -> None:
    state = {"a": torch.ones(1000), "list": [1]}
    pending = checkpoint.save_async(tmp_path, state, 1)
    state["a"].zero_()
    state["list"].append(2)
    assert pending.wait(30).name == "step_00000001"
    assert pending.done()
    target = {"a": torch.zeros(1000), "list": []}
    checkpoint.load(tmp_path, target)
    assert target["a"].all()
    assert target["list"] == [1]


def test_the_error_of_an_asynchronous_save_is_raised_by_wait_and_else_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("labkit.checkpoint.write.dcp_writer.HashedFile.write", fail)
        pending = checkpoint.save_async(tmp_path, {"a": torch.ones(2)}, 1)
        with pytest.raises(CheckpointWriteError, match="No space left"):
            pending.wait(30)
        unseen = checkpoint.save_async(tmp_path, {"a": torch.ones(2)}, 1)
        while not unseen.done():
            pass
    with pytest.raises(CheckpointWriteError, match="No space left"):
        checkpoint.save_async(tmp_path, {"a": torch.ones(2)}, 2)
    checkpoint.save_async(tmp_path, {"a": torch.ones(2)}, 2).wait(30)
    assert manifest.complete_steps(tmp_path) == [2]


def test_extra_state_of_a_module_is_restored(tmp_path: Path) -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extra = 0

        def get_extra_state(self) -> int:
            return self.extra

        def set_extra_state(self, state: int) -> None:
            self.extra = state

    model = nn.Sequential(nn.Linear(1, 1), Extra())
    model[1].extra = 7
    checkpoint.save(tmp_path, {"m": model}, 1)
    model[1].extra = 0
    checkpoint.load(tmp_path, {"m": model})
    assert model[1].extra == 7


def test_any_other_checkpoint_loads_as_well(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    for name in ("m.pt", "m.safetensors"):
        other = nn.Linear(3, 2)
        checkpoint.load(tmp_path / name, dict(other.state_dict()))
        assert torch.equal(other.weight, model.weight)


def test_a_meta_tensor_and_colliding_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="meta tensor"):
        checkpoint.save(tmp_path, {"a": torch.ones(2, device="meta")}, 1)
    with pytest.raises(FQNMismatchError, match=r"a\.b comes from two places"):
        checkpoint.save(tmp_path, {"a": {"b": 1}, "a.b": 2}, 1)
    assert manifest.complete_steps(tmp_path) == []


def test_torch_itself_reads_what_was_saved(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    directory = checkpoint.save(tmp_path, {"m": {"w": torch.arange(6.0).reshape(2, 3)}, "n": [1, 2]}, 1)
    target: dict[str, Any] = {"m": {"w": torch.zeros(2, 3)}, "n": None}
    dcp.load(target, checkpoint_id=directory, no_dist=True)
    assert target["m"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert target["n"] == [1, 2]

"""Values that several ranks may save together: equal to the last bit, buffers, sharded tensors of objects."""

from __future__ import annotations

import pathlib
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from labkit import checkpoint
from labkit.checkpoint import PerRank
from labkit.checkpoint.errors import RankDivergenceError, UnsavableStateError
from labkit.checkpoint.index import manifest
from tests.process.checkpoint_models import Net, adam, fsdp2, train
from tests.process.checkpoint_ranks import Launcher, launcher_fixture  # noqa: F401


class Holder:
    """An object whose state is whatever it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


LONG = np.arange(5000.0)
CHANGED = LONG.copy()
CHANGED[2500] = np.nextafter(2500.0, 3000.0)
PAIRS = [
    (LONG, CHANGED, False),
    (LONG, LONG.copy(), True),
    (LONG, LONG.astype(np.float32), False),
    (LONG.tolist(), CHANGED.tolist(), False),
    (0.0, -0.0, False),
    (float("nan"), float("nan"), True),
    (True, 1, False),
    (np.int32(1), np.int64(1), False),
    ({"b": {1: 2, 3: 4}}, {"b": {3: 4, 1: 2}}, True),
    ([{(1,): 2, None: 4}], [{None: 4, (1,): 2}], True),
    ((OrderedDict([("a", 1), ("b", 2)]),), (OrderedDict([("b", 2), ("a", 1)]),), False),
    ({"a b": 1}, {"a b": 2}, False),
    ({"a b": torch.zeros(1)}, {"a b": torch.zeros(2)}, False),
    (torch.zeros(1), 0.0, False),
    (torch.tensor([0.0]), torch.tensor([-0.0]), False),
    (torch.tensor([1 - 1j]), torch.tensor([1 + 1j]).conj(), True),
    ((torch.tensor([1 - 1j]),), (torch.tensor([1 + 1j]).conj(),), True),
    ((torch.arange(6)[::2],), (torch.arange(0, 6, 2),), True),
    ((torch.ones(2000),), (torch.cat([torch.ones(1000), torch.tensor([1.0000001]), torch.ones(999)]),), False),
    ("a\ud800", "a\ud801", False),
    (1 << 20_000, (1 << 20_000) + 1, False),
    (Counter(a=1), Counter(a=1, b=0), False),
    ({3, "x"}, {"x", 3}, True),
    (list("ab"), ["ab"], False),
    # A dict is a set of names, some of which may be on some ranks only. But the other rank must not have a value in its place, or
    # other names in an object.
    ({"a": 1}, {"b": 2}, True),
    ({"a": 1}, {}, False),
    ({"a": {"b": 1}}, {"a.b": 1}, False),
    ([{"a": 1}], [], False),
    (Holder({"a": 1}), Holder({"a": 1}), True),
    (Holder({"a": 1}), Holder({"a": 1, "b": 2}), False),
    (Holder({"a": {"b": 1}}), Holder({"a": {}}), False),
    (Holder({}), Holder({"a": 1}), False),
    (Holder({}), {"a": 1}, False),
]


def agreeing(rank: int, folder: str) -> list[bool]:
    saved = []
    for step, pair in enumerate(PAIRS):
        try:
            checkpoint.save(folder, {"value": pair[rank]}, step)
            saved.append(True)
        except RankDivergenceError:
            saved.append(False)
    return saved


def test_b_two_ranks_save_a_value_when_they_agree_to_the_last_bit_and_only_then(launcher: Launcher, tmp_path: Path) -> None:
    expected = [agree for *_, agree in PAIRS]
    assert launcher.run(agreeing, 2, tmp_path, str(tmp_path / "store")) == [expected, expected]
    assert manifest.complete_steps(tmp_path / "store") == [step for step, agree in enumerate(expected) if agree]


def one_ranks_path(rank: int, folder: str) -> tuple[str, list[str]]:
    checkpoint.save(folder, {"w": torch.ones(2)}, 1, keep=1)
    value = pathlib.Path("x") if rank == 1 else "x"
    with pytest.raises(UnsavableStateError) as caught:
        checkpoint.save(folder, {"w": torch.zeros(2), "mine": PerRank({"out": value})}, 2, keep=1)
    return str(caught.value), caught.value.__notes__


def test_b_k_what_one_rank_cannot_save_is_refused_on_all_and_the_last_step_stays(launcher: Launcher, tmp_path: Path) -> None:
    first, second = launcher.run(one_ranks_path, 2, tmp_path, str(tmp_path / "store"))
    assert first == second
    assert "mine.rank_1.out is of type pathlib.PosixPath" in first[0]
    assert first[1] == ["Rank 1 raised this, so all ranks do."]
    assert [entry.name for entry in (tmp_path / "store").iterdir()] == ["step_00000001"]


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def batch_norm(rank: int, folder: str) -> tuple[str, list[float], list[float]]:
    model = DistributedDataParallel(normalised())
    torch.manual_seed(rank)
    model(torch.randn(8, 3)).sum().backward()
    with pytest.raises(RankDivergenceError) as caught:
        checkpoint.save(folder, {"model": model}, 1)
    # What the message advises:
    mine = PerRank({name: buffer.clone() for name, buffer in model.named_buffers()})
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    checkpoint.save(folder, {"model": model, "buffers": mine}, 1)
    fresh = DistributedDataParallel(normalised())
    target = {"model": fresh, "buffers": PerRank({name: torch.zeros_like(buffer) for name, buffer in fresh.named_buffers()})}
    checkpoint.load(folder, target)
    own = target["buffers"].value
    assert all(torch.equal(own[name], mine.value[name]) for name in own)
    return str(caught.value), fresh.module[1].running_mean.tolist(), own["module.1.running_mean"].tolist()


def test_p16_buffers_that_differ_are_refused_with_advice_that_works(launcher: Launcher, tmp_path: Path) -> None:
    (text, loaded, own), (_, other_loaded, other_own) = launcher.run(batch_norm, 2, tmp_path, str(tmp_path / "store"))
    assert "model.1.running_mean differs between rank 0 and rank 1" in text
    assert "dist.broadcast(buffer, 0)" in text
    assert "different seeds" not in text
    assert "Wrap each rank's own" not in text
    assert loaded == other_loaded == own
    assert own != other_own


class AppState:
    """The wrapper of torch's own tutorial: sharded tensors in what an object hands out."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "ordered": OrderedDict(b=torch.ones(1), a=1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert list(state.pop("ordered")) == ["b", "a"]
        live = self.model.state_dict()
        assert all(isinstance(value, DTensor) == isinstance(live[name], DTensor) for name, value in state["model"].items())
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def app_state(rank: int, folder: str, save: bool) -> list[Any]:
    model = fsdp2(Net(0 if save else 5)) if dist.get_world_size() > 1 else Net(5)
    optimizer = adam(model)
    train(model, optimizer, 2)
    state = {"app": AppState(model, optimizer)}
    if save:
        checkpoint.save(folder, state, 1)
    else:
        checkpoint.load(folder, state)
    moments = [state["exp_avg"] for state in map(optimizer.state.get, model.parameters()) if state]
    tensors = [*model.parameters(), *moments]
    return [(item.full_tensor() if isinstance(item, DTensor) else item).detach() for item in tensors]


@pytest.mark.parametrize("other", [2, 1, 3])
def test_b_sharded_tensors_of_an_object_come_back_into_its_own(launcher: Launcher, tmp_path: Path, other: int) -> None:
    saved = launcher.run(app_state, 2, tmp_path, str(tmp_path / "store"), True)[0]
    for loaded in launcher.run(app_state, other, tmp_path, str(tmp_path / "store"), False):
        assert all(torch.equal(left, right) for left, right in zip(saved, loaded, strict=True))


def sharded_per_rank(rank: int, folder: str) -> str:
    model = fsdp2(Net(0))
    texts = []
    for state in ({"mine": PerRank(model)}, {"mine": PerRank([next(model.parameters())])}, {"x": (next(model.parameters()),)}):
        with pytest.raises(UnsavableStateError) as caught:
            checkpoint.save(folder, state, 1)
        texts.append(str(caught.value))
    # A whole module is each rank's own.
    own = Net(rank)
    checkpoint.save(folder, {"mine": PerRank(own)}, 1)
    fresh = Net(9)
    checkpoint.load(folder, {"mine": PerRank(fresh)})
    assert all(torch.equal(left, right) for left, right in zip(own.parameters(), fresh.parameters(), strict=True))
    return "\n".join(texts)


def test_b_a_part_of_a_sharded_tensor_is_not_saved_as_one_ranks_own(launcher: Launcher, tmp_path: Path) -> None:
    for text in launcher.run(sharded_per_rank, 2, tmp_path, str(tmp_path / "store")):
        assert "is sharded and in a PerRank" in text
        assert "x[0] is of type torch.distributed.tensor.DTensor" in text

"""Checkpoints of many small tensors: work per tensor must not depend on their number."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from labkit.checkpoint import migrate, open_checkpoint, reshard, verify
from labkit.checkpoint.views import table
from tests.matrix import matrix

FEW = 600


class Many(torch.nn.Module):
    """A model of many small parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ParameterList([torch.full((4,), float(index)) for index in range(count)])


def many(folder: Path, count: int) -> Path:
    """A checkpoint in each format, and one with numbered optimizer state, of ``count`` tensors each."""
    folder.mkdir()
    tensors = Many(count).state_dict()
    torch.save(tensors, folder / "x.pt")
    save_file(tensors, folder / "x.safetensors")
    dcp.save({"model": tensors}, checkpoint_id=folder / "dcp", no_dist=True)
    owned = Many(count // 4).state_dict()
    moments = ({"step": torch.tensor(3.0), "exp_avg": data + 1, "exp_avg_sq": data + 2} for data in owned.values())
    state = dict(enumerate(moments))
    one, each = [{"lr": 0.1, "params": list(state)}], [{"lr": 0.1, "params": [number]} for number in state]
    for name, groups in (("one_group.pt", one), ("groups.pt", each)):
        torch.save({"model": owned, "optimizer": {"state": state, "param_groups": groups}}, folder / name)
    return folder


def model_of(folder: Path) -> Many:
    """The model of a checkpoint with optimizer state."""
    return Many(sum(key.startswith("model.") for key in open_checkpoint(folder / "groups.pt").tensors))


MANY: dict[str, Callable[[Path], object]] = {
    "torch to dcp": lambda folder: migrate(folder / "x.pt", folder / "out"),
    "torch to dcp with patterns": lambda folder: migrate(
        folder / "x.pt", folder / "out", drop=["*.1"], dtypes={"y.*": torch.float16}
    ),
    "safetensors to dcp": lambda folder: migrate(folder / "x.safetensors", folder / "out"),
    "dcp to safetensors": lambda folder: migrate(folder / "dcp", folder / "out", to="safetensors"),
    "dcp to torch": lambda folder: migrate(folder / "dcp", folder / "out", to="torch"),
    "numbered state by model": lambda folder: migrate(folder / "one_group.pt", folder / "out", model=model_of(folder)),
    "numbered state by order": lambda folder: migrate(
        folder / "groups.pt", folder / "out", order=[name for name, _ in model_of(folder).named_parameters()]
    ),
    "reshard": lambda folder: reshard(folder / "dcp", folder / "out", 2),
    "verify torch": lambda folder: verify(folder / "x.pt"),
    "verify safetensors": lambda folder: verify(folder / "x.safetensors"),
    "verify dcp": lambda folder: verify(folder / "dcp", against=folder / "x.safetensors"),
    "verify optimizer state": lambda folder: verify(folder / "one_group.pt"),
    "show": lambda folder: table.render(open_checkpoint(folder / "one_group.pt"), patterns=["*.1"], rows=None, chunks=True),
}


def processor_time(work: Callable[[Path], object], folder: Path) -> float:
    """The least of two runs, in seconds."""
    took = []
    for _ in range(2):
        gc.collect()
        gc.disable()  # a full collection goes through all objects of the test session
        began = time.process_time()
        try:
            work(folder)
        finally:
            took.append(time.process_time() - began)
            gc.enable()
        shutil.rmtree(folder / "out") if (folder / "out").is_dir() else (folder / "out").unlink(missing_ok=True)
    return min(took)


@pytest.fixture(scope="module")
def few_and_many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("many")
    return many(folder / "few", FEW), many(folder / "many", 4 * FEW)


@pytest.mark.parametrize("work", matrix("numbered state by order", *(name for name in MANY if name != "numbered state by order")))
def test_s15_four_times_as_many_tensors_take_about_four_times_as_long(few_and_many: tuple[Path, Path], work: str) -> None:
    few, four_times = few_and_many
    assert processor_time(MANY[work], four_times) < 8 * processor_time(MANY[work], few)

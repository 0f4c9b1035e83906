"""The five checkpoints: each is a good one with one fault of a kind that occurs by accident."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.checkpoint import open_checkpoint
from labkit.course.labs.checks import Pool, from_cell
from labkit.errors import ExerciseError

# Bytes to cut off a file of some hundred kilobytes: few enough that its size does not give it away.
_LEAST_CUT, _LARGEST_CUT = 1_000, 30_000


@dataclass(frozen=True)
class Cases:
    """The folders of the five checkpoints, without their faults.

    Attributes:
        short, not_finite, lost_state, stale, wrapped: The folders of the cases.
        good: The checkpoint from which they were made.
    """

    short: Path
    not_finite: Path
    lost_state: Path
    stale: Path
    wrapped: Path
    good: Path
    _short_file: str = field(repr=False)
    _not_finite: frozenset[str] = field(repr=False)
    _lost_state: frozenset[str] = field(repr=False)
    _stale_file: str = field(repr=False)


def plant(pool: Pool, early: Path, late: Path, folder: Path, *, seed: int) -> Cases:
    """Make the five checkpoints.

    Args:
        pool: Its ranks hold ``model`` and ``optimizer``, which end up in the state of ``late``.
        early: A DCP checkpoint of the same run, some steps earlier.
        late: A DCP checkpoint; its files have the same names as those of ``early``.
        folder: The parent of the new folders, one per case, which replace those of an earlier call.
        seed: Determines which files, parameters and bytes are affected.

    Returns:
        The cases, in folders named by letters that do not reveal the fault.

    Raises:
        ExerciseError: The ranks have no model and optimizer, or there is no checkpoint.

    Ranks: controller.
    """
    if not all((path / ".metadata").exists() for path in (early, late)) or not all(pool.run(_is_trained).values()):
        raise ExerciseError(
            "there is no trained model on the ranks, or no checkpoint of it. After a restart the ranks are empty: run the cells "
            "from the one with pool.push up to here again."
        )
    chance = random.Random(seed)
    paths = dict(zip(("short", "not_finite", "lost_state", "stale", "wrapped"), (folder / name for name in "abcde"), strict=True))
    for path in paths.values():
        shutil.rmtree(path, ignore_errors=True)
    pool.run(_load, late)
    names, num_blocks = pool.run(_parameter_names).same()
    poisoned, emptied = chance.sample(names, 2), f"layers.{chance.randrange(num_blocks)}."
    lost = [name for name in names if name.startswith(emptied)]
    pool.run(_save_not_finite, paths["not_finite"], poisoned)
    pool.run(_save_without_state, paths["lost_state"], lost)
    pool.run(_save_wrapped, paths["wrapped"], f"run-{chance.getrandbits(32):08x}")
    files = sorted(path.name for path in late.glob("*.distcp"))
    short_file = chance.choice(files)
    shutil.copytree(late, paths["short"])
    with open(paths["short"] / short_file, "r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - chance.randrange(_LEAST_CUT, _LARGEST_CUT))
    stale_file = chance.choice(_without_witness(late, files))
    shutil.copytree(late, paths["stale"])
    shutil.copyfile(early / stale_file, paths["stale"] / stale_file)
    for changed, name in ((paths["short"], short_file), (paths["stale"], stale_file)):
        shutil.copystat(late / name, changed / name)  # as after copying to another disk, so that no date reveals the fault
    moments = zip(poisoned, ("exp_avg", "exp_avg_sq"), strict=True)
    return Cases(
        **paths,
        good=late,
        _short_file=short_file,
        _not_finite=frozenset(f"optimizer.state.{name}.{moment}" for name, moment in moments),
        _lost_state=frozenset(lost),
        _stale_file=stale_file,
    )


def _without_witness(late: Path, files: list[str]) -> list[str]:
    """Return the files that no step counter would give away if stale: those with none of the counters, or all of them."""
    tensors = open_checkpoint(late).tensors
    held = Counter(chunk.file for name, entry in tensors.items() if name.endswith(".step") for chunk in entry.chunks)
    return [file for file in files if held[file] in (0, held.total())]


# On the ranks --------------------------------------------------------------------------------------------------------


def _is_trained() -> bool:
    return {"model", "optimizer"} <= vars(sys.modules["__main__"]).keys()


def _load(late: Path) -> None:
    """Restore the cell's model and optimizer to the state of ``late``, whatever happened to them since."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = _state()
    dcp.load(state, checkpoint_id=late)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(from_cell("model"), from_cell("optimizer"), **parts)


def _parameter_names() -> tuple[list[str], int]:
    model = from_cell("model")
    return [name for name, _ in model.named_parameters()], len(model.layers)


def _state() -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(from_cell("model"), from_cell("optimizer"))
    return {"model": weights, "optimizer": moments}


def _save(state: dict[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=folder)


def _save_not_finite(folder: Path, names: list[str]) -> None:
    """Save with one NaN in one moment and one inf in another, as after an unnoticed overflow."""
    state = _state()
    for name, moment, value in zip(names, ("exp_avg", "exp_avg_sq"), (float("nan"), float("inf")), strict=True):
        # The optimizer's own dict must not be changed.
        states = state["optimizer"]["state"][name] = {**state["optimizer"]["state"][name]}
        states[moment] = poisoned = states[moment].clone()
        if from_cell("rank") == 0:
            poisoned.to_local().view(-1)[-1] = value
    _save(state, folder)


def _save_without_state(folder: Path, names: list[str]) -> None:
    """Save without the moments of one block, as if it had been frozen when the optimizer was made but no longer is."""
    state = _state()
    states = {name: value for name, value in state["optimizer"]["state"].items() if name not in names}
    _save({**state, "optimizer": {**state["optimizer"], "state": states}}, folder)


def _save_wrapped(folder: Path, run_name: str) -> None:
    """Save with the prefixed names of a compiled model. The run's name marks copies made from this case."""
    state = _state()
    optimizer = state["optimizer"]
    wrapped = {"state": {_wrapped(name): value for name, value in optimizer["state"].items()}}
    groups = [{**group, "params": [_wrapped(name) for name in group["params"]]} for group in optimizer["param_groups"]]
    model = {_wrapped(name): value for name, value in state["model"].items()}
    _save({"model": model, "optimizer": {**optimizer, **wrapped, "param_groups": groups}, "run_name": run_name}, folder)


def _wrapped(name: str) -> str:
    return f"_orig_mod.{name}"

"""Exercise 2 of notebook 01: everything that training needs to continue."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.base import places
from labkit.course.labs.checks import Pool, ask, from_cell, hint_for, refuse, require_on_ranks, run_on_ranks, trying

if TYPE_CHECKING:
    from labkit.spmd.shards.records import Parity

_STEPS_BEFORE, _STEPS_AFTER = 3, 5
_LEARNING_RATE, _FRESH_LEARNING_RATE = 3e-3, 1e-4


@dataclass(frozen=True)
class Resumed:
    """What one rank observed of a run that was saved, restored with the learner's class, and continued.

    Attributes:
        expected: Losses of the run that was never interrupted.
        losses: Losses of the restored run, for the same steps.
        weights: A comparison of the restored model with the saved one, before any further step.
        moments: The same for the optimizer's tensors and numbers.
        learning_rate: The learning rate of the restored optimizer.
        position: How many batches the restored sampler has produced.
    """

    expected: list[float]
    losses: list[float]
    weights: Parity
    moments: Parity
    learning_rate: float
    position: int


def check_app_state(pool: Pool, *, timeout_s: float = 120.0) -> str:
    """Exercise 2: ``AppState(model, optimizer, batches)`` saves and restores all that training needs to go on.

    A run of a few steps is saved through the class and restored into new objects (another seed, another learning rate, a sampler at
    its start). Then both runs continue, and their losses must be equal bit for bit.

    Args:
        pool: The pool; ``AppState`` is defined on its ranks.
        timeout_s: Seconds after which a rank counts as hung.

    Returns:
        A line with the equal losses.

    Raises:
        ExerciseError: A loss differs; restored state differs although the losses agree; the class raises; or its state is not a
        dict. RunTimeoutError: A rank waits for another one.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    require_on_ranks(pool, "AppState")
    with places.temporary("labkit-check-") as folder:
        seen = run_on_ranks(pool, _resume, folder, timeout_s=timeout_s)[0]
    mistakes: list[tuple[Callable[[Resumed], bool], str]] = [
        (
            lambda found: not found.weights,
            "The weights are not the saved ones. Look at what load_state_dict does with the model's part.",
        ),
        (
            lambda found: found.learning_rate == _FRESH_LEARNING_RATE,
            "The optimizer knows nothing of the past. Loading fills tensors in place, but a number such as the learning rate is "
            "only replaced in the dict: it reaches the optimizer when load_state_dict hands it over.",
        ),
        (
            lambda found: any(difference.kind == "missing" for difference in found.moments.differences),
            "The learning rate came back, the moments did not. A new optimizer has no moments yet, so its own state_dict() offers "
            "no place to load them into. get_state_dict makes them, and names them after their parameters.",
        ),
        (
            lambda found: not found.moments,
            "The optimizer's moments or steps came back changed. Look at what is done after loading.",
        ),
        (
            lambda found: found.position != _STEPS_BEFORE,
            "Model and optimizer are right, the data is not: the sampler has to continue where it was.",
        ),
    ]
    agreeing = sum(left == right for left, right in zip(seen.losses, seen.expected, strict=True))
    hint = hint_for(seen, mistakes)
    if agreeing < _STEPS_AFTER or hint:
        gap = max(abs(left - right) for left, right in zip(seen.losses, seen.expected, strict=True))
        refuse(
            f"{agreeing} of the {_STEPS_AFTER} later losses are equal; the largest gap is {gap:.3g} nats per byte. "
            f"The learning rate is {seen.learning_rate:g}, the next batch is number {seen.position}.",
            f"{_STEPS_AFTER} equal losses, learning rate {_LEARNING_RATE:g}, batch number {_STEPS_BEFORE}.",
            hint,
        )
    shown = ", ".join(f"{loss:.4f}" for loss in seen.losses)
    return (
        f"Solved: {_STEPS_AFTER} later losses equal bit for bit ({shown}), and so are {seen.moments.num_tensors} optimizer tensors."
    )


def _resume(folder: str) -> Resumed:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from labkit.spmd import BatchSampler, Block, ModelConfig, build_model, shard_model

    rank, world_size, device = (from_cell(name) for name in ("rank", "world_size", "device"))
    mesh = init_device_mesh(device.type, (world_size,))
    config = ModelConfig(dim=32, num_layers=1, num_heads=2, hidden_dim=48, max_seq_len=32)

    def start(seed: int, learning_rate: float) -> tuple[Any, Any, Any]:
        model = shard_model(build_model(config, seed=seed, device=device), mesh, blocks=Block)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        batches = BatchSampler(batch_size=2 * world_size, seq_len=32, seed=1, rank=rank, world_size=world_size, device=device)
        return model, optimizer, batches

    # The class must work with its arguments, so the notebook's own objects are hidden from it.
    with _hidden("model", "optimizer", "batches"):
        return _compare_runs(folder, start)


def _compare_runs(folder: str, start: Callable[[int, float], tuple[Any, Any, Any]]) -> Resumed:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    from labkit.spmd import compare, train

    model, optimizer, batches = start(0, _LEARNING_RATE)
    train(model, optimizer, batches, _STEPS_BEFORE)
    with trying("what state_dict returned", "a dict that DCP can save, with tensors, numbers and texts in dicts and lists."):
        _through(dcp.save, {"app": _Asked(model, optimizer, batches)}, checkpoint_id=folder)

    restored, restored_optimizer, restored_batches = start(1, _FRESH_LEARNING_RATE)
    with trying("what state_dict returned", "a dict with the same names in the saved and in the fresh run."):
        _through(dcp.load, {"app": _Asked(restored, restored_optimizer, restored_batches)}, checkpoint_id=folder)
    saved_moments = get_optimizer_state_dict(model, optimizer)
    # Do not ask for an optimizer's state if it has none: that would take a step.
    moments = get_optimizer_state_dict(restored, restored_optimizer) if restored_optimizer.state else {}
    position, learning_rate = restored_batches.position, restored_optimizer.param_groups[0]["lr"]
    weights = compare(get_model_state_dict(restored), get_model_state_dict(model))
    parity = compare(moments, saved_moments)
    return Resumed(
        expected=train(model, optimizer, batches, _STEPS_AFTER),
        losses=train(restored, restored_optimizer, restored_batches, _STEPS_AFTER),
        weights=weights,
        moments=parity,
        learning_rate=learning_rate,
        position=position,
    )


def _through(call: Callable[..., Any], state: dict[str, Any], checkpoint_id: str) -> None:
    from torch.distributed.checkpoint import CheckpointException

    try:
        call(state, checkpoint_id=checkpoint_id)
    except CheckpointException as error:  # not an Exception: it would bypass all handling of a learner's errors
        first = min(error.failures)
        raise ValueError(str(error.failures[first][0])) from None


class _Asked:
    """A layer between DCP and the learner's object, so that errors are reported with the learner's line rather than DCP's."""

    def __init__(self, *parts: Any) -> None:
        self._app = ask(from_cell("AppState"), *parts, case="with model, optimizer and batches")

    def state_dict(self) -> dict[str, Any]:
        state = ask(self._app.state_dict, case="saving")
        if not isinstance(state, dict):
            hint = "get_state_dict returns two dicts. Put them into one, under two names of your own."
            refuse(f"state_dict returned a {type(state).__name__}.", "a dict.", hint if isinstance(state, tuple) else "")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ask(self._app.load_state_dict, state, case="loading")


@contextlib.contextmanager
def _hidden(*names: str) -> Iterator[None]:
    namespace = vars(sys.modules["__main__"])
    kept = {name: namespace.pop(name) for name in names if name in namespace}
    try:
        yield
    finally:
        namespace.update(kept)

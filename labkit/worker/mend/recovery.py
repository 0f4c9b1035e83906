"""Recovery of a rank after a run that was cut off: process groups, sharded models, and notes on what is lost.

Restored are: every process group that all its ranks know, with everything that uses it (meshes, DTensors); every FSDP2, FSDP1 and
DDP model. A model that was cut in a forward or backward, on any rank, loses its gradients on all ranks; complete gradients are
kept.

Not restored, but named in the run's notes: a group that exists only on some of its ranks; an optimizer that took a step on some
ranks and not on others, or half a step; parameters that user code has changed differently, if the ranks can be compared (replicas
by their values, FSDP2's shards by the number of changes); random states that have become different. Not known here, and not named:
buffers that the cut forward updated (running statistics), positions of data loaders and of learning-rate schedulers, changes in
place of FSDP1's parameters and of shards through ``.data``.
"""

from __future__ import annotations

import functools
import hashlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import _get_sequence_nr

from labkit.wire.messages import Begun, GroupSpec
from labkit.worker.groups import backends
from labkit.worker.groups.conditions import Condition, GroupCondition, StepCondition
from labkit.worker.groups.judgement import judge
from labkit.worker.groups.process_group import ProcessGroups
from labkit.worker.mend import fsdp_private, wrappers
from labkit.worker.mend.optimizer_steps import OptimizerSteps, StepRecord, parameters_of
from labkit.worker.mend.thread_modes import ThreadModes
from labkit.worker.steps.run_state import RunState


class Recovery:
    """The data that this rank records about a run, in order to repair what the run may break.

    Args:
        rank: This rank.
        state: The state of the main thread.
        groups: This rank's process groups.
        namespace: The variables of the rank's cells. Models and optimizers are named by them.
    """

    def __init__(self, rank: int, state: RunState, groups: ProcessGroups, namespace: Mapping[str, Any]) -> None:
        self._rank, self._groups, self._namespace = rank, groups, namespace
        self._steps = OptimizerSteps(state, groups.gate)
        self._steps.install()
        self._run_id = 0
        self._cut = self._well = self._in_backward = False
        self._modes = ThreadModes()
        self._graph_nodes = 0
        self._random: dict[str, torch.Tensor] = {}
        self._progress = backends.progress()

    def begin(self, run_id: int) -> None:
        """Record the state at the beginning of a run. Takes about 10 us."""
        self._run_id, self._cut, self._well, self._in_backward = run_id, False, False, False
        self._modes = ThreadModes()
        self._steps.begin_run()
        self._graph_nodes = _get_sequence_nr()
        self._random = _random_states()
        self._progress = backends.progress()

    def begun(self) -> Begun | None:
        """Return what the run has begun on the process groups, or None if nothing. Takes about 10 us."""
        if backends.progress() == self._progress:
            return None
        ranks = {backends.group_name(group): backends.group_ranks(group) for group in backends.groups()}
        return Begun(backends.begun_since(self._progress), ranks, backends.group_count())

    def end(self, error: BaseException | None, *, cut: bool) -> None:
        """Record the end of the run on this rank.

        Args:
            error: The error that it raised, or None.
            cut: Whether it was interrupted, or freed from a collective.
        """
        self._cut, self._well = cut, error is None
        self._in_backward = error is not None and _is_inside_backward(error)
        if cut:
            self._modes.restore()

    def mend(self, group: GroupSpec, run_id: int) -> dict[str, Any]:
        """Repair what can be repaired. Collective over all ranks of the pool; may be repeated.

        Args:
            group: The place where the ranks meet.
            run_id: The number of this repair.

        Returns:
            ``renewed`` (whether the process groups have new backends) and ``notes`` (a list of sentences).

        Raises:
            RuntimeError: The process groups could not be rebuilt.
        """
        found = functools.cache(wrappers.find)
        conditions = self._groups.meet(group, run_id, lambda: self._condition(found).to_json())
        verdict = judge([Condition.from_json(text) for text in conditions])
        backends.set_group_count(verdict.group_count)
        if verdict.renew:
            self._groups.renew(verdict.broken.keys())
        for process_group in backends.groups():
            reason = verdict.broken.get(backends.group_name(process_group))
            if reason:
                backends.break_group(process_group, reason)
        notes = list(verdict.notes)
        if verdict.restart_reducers:
            notes = wrappers.restart_reducers(found()) + notes
        if verdict.drop:
            dropped, problems = wrappers.reset(found(), verdict.drop)
            notes = problems + notes
            if dropped:
                what = _DROPPED if verdict.in_flight else _UNEVEN
                known = _STEPS_KNOWN if verdict.steps_known else "." if verdict.refusals else _NO_STEP_KNOWN
                notes.insert(0, what + known)
        for refusal in verdict.refusals:
            if self._rank in refusal.ranks:
                self._steps.refuse(refusal.position, refusal.signature, refusal.reason)
        return {"renewed": verdict.renew, "notes": notes}

    def _condition(self, found: Callable[[], wrappers.Wrappers]) -> Condition:
        self._groups.settle()
        groups = {
            backends.group_name(group): GroupCondition(
                backends.group_ranks(group), backends.sequence(group), backends.obstacle(group)
            )
            for group in backends.groups()
        }
        now = _random_states()
        touched = bool(self._steps.records) or _get_sequence_nr() != self._graph_nodes or backends.progress() != self._progress
        models = wrappers.models(found(), in_backward=self._in_backward) if touched else []
        queued = self._may_be_queued()
        return Condition(
            rank=self._rank,
            run_id=self._run_id,
            cut=self._cut,
            well=self._well,
            touched=touched,
            lost=self._groups.lost,
            waiting=backends.waiting(),
            homeless=not torch.distributed.is_initialized(),
            foreign=self._groups.foreign,
            groups=groups,
            group_count=backends.group_count(),
            steps=self._step_conditions(found),
            in_flight=tuple(model.signature for model in models if model.in_flight or (queued and model.graded)),
            gradients=self._gradients(models),
            prints=self._prints(models),
            random={name: (_digest(state), _digest(now[name])) for name, state in self._random.items()},
            unsynced=fsdp_private.fsdp2_unsynced(),
        )

    def _may_be_queued(self) -> bool:
        """Return whether gradients may wait for the device although their backward has returned.

        On a GPU a backward only queues its work. When collectives were cut, what was queued behind them has run on numbers that
        never came, or has not run. How far the device had got is unknown, so nothing that this run computed counts as complete.
        """
        cut = self._groups.lost or backends.waiting()
        return _queues_work() and cut and _get_sequence_nr() != self._graph_nodes

    def _step_conditions(self, found: Callable[[], wrappers.Wrappers]) -> tuple[StepCondition, ...]:
        if not self._steps.records:
            return ()
        owners = found().owners()
        return tuple(self._step_condition(record, owners) for record in self._steps.records)

    def _step_condition(self, record: StepRecord, owners: dict[int, Any]) -> StepCondition:
        optimizer = record.optimizer()
        if optimizer is None:
            return StepCondition("an optimizer that is gone", record.signature, record.completed, False, shared=False)
        record.skipped += self._groups.gate.take_skipped(optimizer)  # kept, because the same run may be repaired again
        return StepCondition(
            label=self._label(optimizer, owners),
            signature=record.signature,
            completed=record.completed - record.skipped,
            skipped=record.skipped,
            under_way=record.under_way,
            shared=any(id(parameter) in owners for parameter in parameters_of(optimizer)),
            rates=tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group),
        )

    def _prints(self, models: Sequence[wrappers.Model]) -> dict[str, tuple[str, dict[str, str]]]:
        named = [(self._name(model), model) for model in models if model.parameters]
        keys = [f"{name} {model.signature} {model.ranks}" for name, model in named]
        # If nothing distinguishes two models, it is not known which is which on another rank.
        return {
            key: (name, wrappers.fingerprints(model))
            for key, (name, model) in zip(keys, named, strict=True)
            if keys.count(key) == 1
        }

    def _gradients(self, models: Sequence[wrappers.Model]) -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        for model in models:
            names, texts = found.get(model.signature, ("", ""))
            name = f"{names} and {self._name(model)}" if names else self._name(model)
            found[model.signature] = name, texts + model.graded
        return found

    def _name(self, model: wrappers.Model) -> str:
        """Describe a model by the variable that holds it, if there is one."""
        if model.module is None:
            return model.kind
        owned, modules = set(map(id, model.parameters.values())), {id(model.module)}
        name = next((name for name, value in list(self._namespace.items()) if _holds(value, owned, modules)), "a model")
        return f"{name} ({model.kind.removesuffix(' model')})"

    def _label(self, optimizer: torch.optim.Optimizer, owners: dict[int, Any]) -> str:
        """Describe an optimizer by the variables that hold it and its model, if there are any."""
        owned = {id(parameter) for parameter in parameters_of(optimizer)}
        wrapped = {id(owner) for parameter, owner in owners.items() if parameter in owned}
        variables = list(self._namespace.items())
        name = next((name for name, value in variables if value is optimizer), "an optimizer")
        model = next((name for name, value in variables if _holds(value, owned, wrapped)), None)
        kind = type(optimizer).__name__
        return f"{name} ({kind}, for {model})" if model else f"{name} ({kind})"


_DROPPED = "A forward or backward under way is dropped: gradients are None"
_UNEVEN = "Gradients that only some ranks still had are dropped: gradients are None"
_STEPS_KNOWN = ", parameters are as the last completed step left them."
_NO_STEP_KNOWN = ". This run completed no step on all ranks: parameters are as before it, or as its own code left them."


def _queues_work() -> bool:
    """Return whether this process has used a device whose calls return before their work is done."""
    return bool(torch.cuda.is_initialized())


def _is_inside_backward(error: BaseException) -> bool:
    """Return whether an error has passed through autograd's engine."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code.co_name == "_engine_run_backward" for frame in frames)


def _holds(value: Any, parameters: set[int], modules: set[int]) -> bool:
    if not issubclass(type(value), torch.nn.Module):
        return False
    try:
        return any(id(module) in modules for module in value.modules()) or any(id(p) in parameters for p in value.parameters())
    except Exception:
        return False  # a module whose construction was cut off


def _random_states() -> dict[str, torch.Tensor]:
    states = {"CPU": torch.random.default_generator.get_state()}
    if torch.cuda.is_initialized():
        states["CUDA"] = torch.cuda.default_generators[torch.cuda.current_device()].get_state()
    return states


def _digest(state: torch.Tensor) -> str:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()

"""The conclusions of all ranks from their exchanged conditions after a run was cut off.

The ranks exchange their conditions, and each reaches the same verdict on its own: :func:`judge` is a pure function of the exchanged
conditions. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labkit.base.plain_text import format_ranks
from labkit.worker.groups.conditions import Condition, GroupCondition, StepCondition

# The largest number of parameters that a note names.
NAMED = 4


@dataclass(frozen=True, slots=True)
class Refusal:
    """An optimizer that must not take further steps; see :meth:`labkit.worker.mend.optimizer_steps.OptimizerSteps.refuse`."""

    ranks: tuple[int, ...]
    position: int
    signature: str
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The measures that all ranks take in the same way.

    Attributes:
        renew: Whether to give the process groups new backends.
        drop: Signatures of the models whose iteration every rank drops.
        in_flight: Whether one of them was in a forward or backward; otherwise only some ranks had gradients of it.
        restart_reducers: Whether to reset DDP's reducers.
        steps_known: Whether every rank has completed the same steps of the same optimizers in the run, at least one.
        group_count: The new value of torch's counter.
        broken: Groups that can no longer be used, by name, with the reason.
        refusals: Optimizers that must not go on.
        notes: Notes on what cannot be restored, a sentence each.
    """

    renew: bool
    drop: tuple[str, ...]
    in_flight: bool
    restart_reducers: bool
    steps_known: bool
    group_count: int
    broken: Mapping[str, str]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]


Holders = dict[str, dict[int, GroupCondition]]
"""For each group, by name, the condition reported by each rank that has it."""


def judge(conditions: Sequence[Condition]) -> Verdict:
    """Judge the conditions of all ranks of the pool.

    Raises:
        RuntimeError: The groups need new backends or a rank joins, and a rank has lost the default group that this needs.
    """
    latest = max(condition.run_id for condition in conditions)
    # A rank that did not take part reports on an earlier run.
    took_part = [condition for condition in conditions if condition.run_id == latest]
    holders = _holders(conditions)
    orphaned = _orphaned_groups(holders, {condition.rank for condition in conditions if condition.new})
    unequal = _unequal_groups({name: found for name, found in holders.items() if name not in orphaned})
    broken = orphaned | unequal
    renew = any(condition.lost or condition.waiting for condition in conditions) or _out_of_step(conditions, broken)
    _refuse_unknown_default(conditions)
    homeless = [condition.rank for condition in conditions if condition.homeless]
    if renew and homeless:
        raise RuntimeError(f"the default process group was destroyed on {_subject(homeless)}")
    # If a run ended well on all its ranks, groups may be out of step, but no iteration was cut and no step is missing.
    well = all(condition.well for condition in took_part)
    cut = not well and (renew or any(condition.cut for condition in took_part))
    touched = not well and any(condition.touched for condition in took_part)
    refusals, notes = ([], []) if well else _judge_steps(took_part)
    notes = [*_judge_new(conditions), *_judge_orphaned(orphaned), *unequal.values(), *notes]
    if not well and not refusals:
        notes += _judge_prints(took_part)
    in_flight = {name for condition in took_part for name in condition.in_flight} if touched else set()
    uneven, kept = _judge_gradients(took_part, in_flight) if touched and cut else (set(), [])
    notes += kept
    if cut:
        notes += _judge_random(took_part) + _judge_switches(took_part)
    return Verdict(
        renew=renew,
        drop=tuple(sorted(in_flight | uneven)),
        in_flight=bool(in_flight),
        restart_reducers=touched and cut,
        steps_known=not refusals and _steps_known(took_part),
        group_count=max(condition.group_count for condition in conditions),
        broken=broken,
        refusals=tuple(refusals),
        notes=tuple(notes),
    )


def _refuse_unknown_default(conditions: Sequence[Condition]) -> None:
    """Raise an error if a rank joins and another has lost labkit's default group: the new rank can join only that one."""
    without = [condition.rank for condition in conditions if condition.homeless or condition.foreign]
    if any(condition.new for condition in conditions) and without:
        raise RuntimeError(f"the default process group was destroyed or made anew on {_subject(without)}")


def _judge_new(conditions: Sequence[Condition]) -> list[str]:
    new = [condition.rank for condition in conditions if condition.new]
    if not new:
        return []
    verb, it = ("is new and has", "it") if len(new) == 1 else ("are new and have", "them")
    return [
        f"{_subject(new).capitalize()} {verb} no variables and no imports: run the cells on {it} that make them. "
        "What was sharded over the old one has lost that share: build it again on all ranks and load a checkpoint."
    ]


def _holders(conditions: Sequence[Condition]) -> Holders:
    holders: Holders = {}
    for condition in conditions:
        for name, group in condition.groups.items():
            holders.setdefault(name, {})[condition.rank] = group
    return holders


def _orphaned_groups(holders: Holders, new: set[int]) -> dict[str, str]:
    """Return the groups that lost a rank because its replacement does not have them."""
    orphaned = {}
    for name, found in holders.items():
        ranks = next(iter(found.values())).ranks
        if (gone := new & set(ranks)) - set(found):
            what = f"The process group {name!r} of {_subject(ranks)}"
            orphaned[name] = f"{what} has lost {_subject(sorted(gone))}, replaced by a fresh one. Make it again, on all ranks."
    return orphaned


def _judge_orphaned(orphaned: Mapping[str, str]) -> list[str]:
    """Return notes on these groups. A mesh has a group for each axis, so if there are several, one note covers them all."""
    if len(orphaned) < 2:
        return list(orphaned.values())
    return [f"{len(orphaned)} process groups have lost a rank: make meshes, sharded models and groups again, on all ranks."]


def _unequal_groups(holders: Holders) -> dict[str, str]:
    """Return the groups that are not the same on all of their ranks, or cannot be rebuilt there."""
    broken = {}
    for name, found in holders.items():
        if all(group.ranks == (rank,) and not group.obstacle for rank, group in found.items()):
            continue  # groups of one rank each may share a name: they meet nobody
        first = next(iter(found.values()))
        what = f"The process group {name!r} of {_subject(first.ranks)}"
        obstacles = sorted({group.obstacle for group in found.values() if group.obstacle})
        if any(group.ranks != first.ranks for group in found.values()) or set(found) != set(first.ranks):
            broken[name] = (
                f"{what} exists only on {_subject(sorted(found))}, for the run stopped while it was being made. "
                "Using it raises an error; make it again on all its ranks."
            )
        elif obstacles:
            broken[name] = f"{what} cannot be rebuilt: {obstacles[0]}. Using it raises an error; make it again."
    return broken


def _out_of_step(conditions: Sequence[Condition], broken: Mapping[str, str]) -> bool:
    """Return whether ranks of a group have begun different numbers of collectives, so that the next calls would not match."""
    sequences: dict[str, set[tuple[int, ...]]] = {}
    for condition in conditions:
        for name, group in condition.groups.items():
            if group.ranks != (condition.rank,):
                sequences.setdefault(name, set()).add(group.sequence)
    return any(len(found) > 1 for name, found in sequences.items() if name not in broken)


def _judge_steps(took_part: Sequence[Condition]) -> tuple[list[Refusal], list[str]]:
    refusals: list[Refusal] = []
    notes: list[str] = []
    for position in range(max(len(condition.steps) for condition in took_part)):
        kinds: dict[str, dict[int, StepCondition]] = {}
        for condition in took_part:
            if position < len(condition.steps):
                step = condition.steps[position]
                kinds.setdefault(step.signature, {})[condition.rank] = step
        for signature, steps in kinds.items():
            # If ranks run different programs, it is not known here which steps belong together.
            shared = len(kinds) == 1 and any(step.shared for step in steps.values())
            label = next(iter(steps.values())).label
            half = [rank for rank, step in steps.items() if step.under_way]
            notes += _judge_skipped(label, {rank: step.skipped for rank, step in steps.items() if step.skipped})
            happened = _what_diverged(label, half, _counts(took_part, steps) if shared else {})
            if happened:
                ranks = tuple(condition.rank for condition in took_part) if shared else tuple(half)
                refusals.append(Refusal(ranks, position, signature, _refusal(label, happened)))
                notes.append(
                    f"{happened} Its parameters are not those of one step any more: its next step() raises an error until a "
                    "checkpoint has been loaded into model and optimizer; pool.restart() gives fresh ranks."
                )
            elif shared and len({step.rates for step in steps.values()}) > 1:
                rates = "; ".join(f"rank {rank}: {', '.join(map(str, step.rates))}" for rank, step in steps.items())
                notes.append(f"The learning rates of {label} differ now ({rates}). Set them alike before the next step.")
    return refusals, notes


def _steps_known(took_part: Sequence[Condition]) -> bool:
    steps = {tuple((step.signature, step.completed) for step in condition.steps) for condition in took_part}
    return len(steps) == 1 and any(completed for _, completed in next(iter(steps)))


def _judge_gradients(took_part: Sequence[Condition], in_flight: set[str]) -> tuple[set[str], list[str]]:
    """Find the models for which only some ranks have gradients, and write notes on those for which all ranks do.

    A stop may come between one rank's zero_grad() and another's: the next backward would add to old gradients on one of them.
    """
    uneven: set[str] = set()
    kept: dict[str, None] = {}
    for signature in dict.fromkeys(name for condition in took_part for name in condition.gradients):
        found = [condition.gradients[signature] for condition in took_part if signature in condition.gradients]
        if len({text for _, text in found}) > 1:
            uneven.add(signature)
        elif found[0][1] and signature not in in_flight:
            kept[found[0][0]] = None
    if not kept:
        return uneven, []
    told = "gradients are complete and kept. zero_grad() clears them; else the next backward adds to them."
    return uneven, [f"{' and '.join(kept)}: {told}"]


def _judge_prints(took_part: Sequence[Condition]) -> list[str]:
    """Return a note for each model whose parameters differ between ranks, for example because the reader's own update was cut."""
    notes = []
    for key in dict.fromkeys(key for condition in took_part for key in condition.prints):
        known = {condition.rank: condition.prints[key][1] for condition in took_part if key in condition.prints}
        model = next(condition.prints[key][0] for condition in took_part if key in condition.prints)
        names = next(iter(known.values()))
        unlike = [name for name in names if len({prints.get(name) for prints in known.values()}) > 1]
        if not unlike:
            continue
        camps: dict[tuple[str | None, ...], list[int]] = {}
        for rank, prints in known.items():
            camps.setdefault(tuple(prints.get(name) for name in unlike), []).append(rank)
        told = ", ".join(unlike[:NAMED]) + (f" and {len(unlike) - NAMED} more" if len(unlike) > NAMED else "")
        differ = "may differ" if any(text.endswith(" changes") for text in names.values()) else "differ"
        notes.append(
            f"{len(unlike)} of {len(names)} parameters of {model} {differ} between {' and '.join(map(_subject, camps.values()))}: "
            f"{told}. An update outside an optimizer's step() was cut half way, or they differed before. Load a checkpoint on all "
            "ranks, or send one rank's values to the others."
        )
    return notes


def _judge_skipped(label: str, skipped: Mapping[int, int]) -> list[str]:
    if not skipped:
        return []
    told = ", ".join(f"{count} on rank {rank}" for rank, count in skipped.items())
    return [
        f"Steps of {label} that were queued on the GPU behind what was cut off have changed nothing: {told}. "
        "What the cell counted, scheduled or noted down after them belongs to steps that were not taken."
    ]


def _counts(took_part: Sequence[Condition], steps: Mapping[int, StepCondition]) -> dict[int, list[int]]:
    counts: dict[int, list[int]] = {}
    for condition in took_part:
        counts.setdefault(steps[condition.rank].completed if condition.rank in steps else 0, []).append(condition.rank)
    return counts


def _what_diverged(label: str, half: Sequence[int], counts: Mapping[int, Sequence[int]]) -> str:
    if half:
        return f"{_subject(half).capitalize()} stopped inside step() of {label}, which is half applied there."
    if len(counts) < 2:
        return ""
    told = ", ".join(f"{count} on {_subject(ranks)}" for count, ranks in sorted(counts.items(), reverse=True))
    return f"Steps of {label} completed in this run: {told}."


def _refusal(label: str, happened: str) -> str:
    return (
        f"step() of {label} is refused, for a run was stopped at a bad moment. {happened} Load a checkpoint into model and "
        "optimizer on all ranks (load_state_dict or set_optimizer_state_dict lifts this), or call pool.restart()."
    )


def _judge_random(took_part: Sequence[Condition]) -> list[str]:
    notes = []
    for name in took_part[0].random:
        states = {item.rank: item.random[name] for item in took_part if name in item.random}
        before, after = ({state[i] for state in states.values()} for i in (0, 1))
        if len(states) < len(took_part) or len(before) > 1 or len(after) < 2:
            continue
        drew = [rank for rank, state in states.items() if state[0] != state[1]]
        others = "in different numbers" if len(drew) == len(states) else "and the others did not"
        notes.append(
            f"{_subject(drew).capitalize()} drew random numbers {others}, so the {name} random states, equal before, differ now; "
            "torch.manual_seed(...) on all ranks makes them equal."
        )
    return notes


def _judge_switches(took_part: Sequence[Condition]) -> list[str]:
    off = [condition.rank for condition in took_part if condition.unsynced]
    if len({condition.unsynced for condition in took_part}) < 2:
        return []
    return [
        f"Gradient synchronization of an FSDP2 model is switched off on {_subject(off)} only; call "
        "set_requires_gradient_sync(True) on all ranks before the next step."
    ]


def _subject(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"

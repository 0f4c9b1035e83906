"""The conditions that ranks exchange after a run was cut off. Nothing here needs torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class GroupCondition:
    """A process group as one of its ranks sees it.

    Attributes:
        ranks: Its global ranks.
        sequence: Number of collectives begun so far, per backend.
        obstacle: Why it cannot be rebuilt; empty if it can.
    """

    ranks: tuple[int, ...]
    sequence: tuple[int, ...]
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class StepCondition:
    """An optimizer that was used in the run.

    Attributes:
        label: A description, for example ``opt (Adam, for model)``.
        signature: See :func:`labkit.worker.mend.optimizer_steps.signature_of`.
        completed: Steps completed in this run.
        under_way: Whether a step was interrupted half way.
        shared: Whether its parameters belong to a sharded or replicated model, so that all ranks have to take the same steps.
        rates: The learning rate of each of its groups.
        skipped: Steps that were launched and changed nothing; see :mod:`labkit.worker.steps.step_gate`.
    """

    label: str
    signature: str
    completed: int
    under_way: bool
    shared: bool
    rates: tuple[float, ...] = ()
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition of one rank.

    Attributes:
        rank: The rank.
        run_id: The last run it took part in.
        cut: Whether it was interrupted in that run, or freed from a collective.
        well: Whether that run ended without an error on this rank.
        touched: Whether in that run it began a collective, built an autograd graph or took an optimizer step.
        lost: Whether its process groups have been aborted.
        waiting: Whether a collective that it began has not ended.
        homeless: Whether it has no default process group any more.
        foreign: Whether its default process group is not the one that labkit made.
        new: Whether it has just been started to replace another process, and joins.
        groups: Its process groups by name.
        group_count: Torch's counter for the names of new groups.
        steps: The run's optimizers in the order of their first steps.
        in_flight: Signatures of the models whose forward or backward the run was in when it was cut; see
            :func:`labkit.worker.mend.wrappers.models`.
        gradients: By a model's signature: its name, and a text that identifies which of its parameters have a gradient (empty if
            none has).
        prints: By a key that identifies a model and its ranks: its name, and for each parameter a text that is equal on ranks that
            have changed it in the same way.
        random: Digests of each random state before and after the run, by name.
        unsynced: FSDP2 parameter groups whose gradients are not reduced (``set_requires_gradient_sync(False)``).
    """

    rank: int
    run_id: int
    cut: bool = False
    well: bool = False
    touched: bool = False
    lost: bool = False
    waiting: bool = False
    homeless: bool = False
    foreign: bool = False
    new: bool = False
    groups: Mapping[str, GroupCondition] = field(default_factory=dict)
    group_count: int = 0
    steps: tuple[StepCondition, ...] = ()
    in_flight: tuple[str, ...] = ()
    gradients: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    prints: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    random: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    unsynced: int = 0

    def to_json(self) -> str:
        """Return this condition as text for the exchange."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Condition:
        """Parse the text that :meth:`to_json` wrote."""
        fields = json.loads(text)
        fields["groups"] = {
            name: GroupCondition(tuple(group["ranks"]), tuple(group["sequence"]), group["obstacle"])
            for name, group in fields["groups"].items()
        }
        fields["steps"] = tuple(StepCondition(**{**step, "rates": tuple(step["rates"])}) for step in fields["steps"])
        fields["in_flight"] = tuple(fields["in_flight"])
        fields["gradients"] = {signature: (name, text) for signature, (name, text) in fields["gradients"].items()}
        fields["prints"] = {key: (name, prints) for key, (name, prints) in fields["prints"].items()}
        fields["random"] = {name: (before, after) for name, (before, after) in fields["random"].items()}
        return cls(**fields)

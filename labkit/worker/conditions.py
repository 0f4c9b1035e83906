"""What each rank knows after a run was cut off, as the ranks exchange it. Nothing here needs torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class GroupCondition:
    """A process group as one of its ranks knows it.

    Attributes:
        ranks: Its global ranks.
        sequence: Collectives begun so far, per device type.
        obstacle: Why it cannot be rebuilt; empty where it can.
    """

    ranks: tuple[int, ...]
    sequence: tuple[int, ...]
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class StepCondition:
    """An optimizer that was used in the run.

    Attributes:
        label: It in words, for example ``opt (Adam, for model)``.
        signature: See :func:`labkit.worker.optimizer_steps.signature_of`.
        completed: Steps completed in this run.
        under_way: A step was cut half way.
        shared: Its parameters belong to a sharded or replicated model, so all ranks have to take the same steps.
        rates: The learning rate of each of its groups.
        skipped: Steps that were launched and changed nothing; see :mod:`labkit.worker.step_gate`.
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
    """What one rank knows.

    Attributes:
        rank: The rank.
        run_id: The last run it took part in.
        cut: It was interrupted in that run, or freed from a collective.
        well: That run ended without an error here.
        touched: In that run it began a collective, built an autograd graph or took an optimizer step.
        lost: Its process groups have been aborted.
        waiting: A collective that it began has not ended.
        homeless: It has no default process group any more.
        foreign: Its default process group is not the one that labkit made.
        new: It has just been started in the place of another and joins.
        groups: Its process groups by name.
        group_count: Torch's counter for the names of new groups.
        steps: The run's optimizers in the order of their first steps.
        in_flight: Signatures of the models in whose forward or backward the run was cut; see :func:`labkit.worker.wrappers.models`.
        gradients: By the signature of a model: its name, and a text that tells which of its parameters have a gradient; empty where
            none has.
        prints: By what tells a model and its ranks apart from others: its name, and by parameter a text that is equal on ranks
            that have changed it alike.
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
        """As text for the exchange."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Condition:
        """Read what :meth:`to_json` wrote."""
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

"""Exercise 4 of notebook 04: a function that judges whether two trainings are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.course.labs.checks import Pool, ask, from_cell, refuse, refuse_hang, require_on_ranks, run_on_ranks
from labkit.course.labs.lab04.trainings import PLANTED, Run, copied, planted, trained
from labkit.errors import ExerciseError, RunTimeoutError


@dataclass(frozen=True)
class _Kind:
    """A run that the judge has to recognize: a way of training, or the reference with something planted in it.

    Attributes:
        what: A description.
        same: Whether it is the same training up to the order of sums.
        needs: The smallest number of ranks with which it differs or can be made.
        hint: The hint for a judge that is wrong about it; empty if it differs from the reference only in noise.
    """

    what: str
    same: bool
    needs: int
    hint: str = ""


_KINDS = {
    "again": _Kind("a copy of the reference", True, 1, "It is equal bit for bit."),
    "ddp": _Kind("DDP", True, 2),
    "fsdp2": _Kind("FSDP2", True, 1),
    "rounded": _Kind("the reference with every number moved by a last place of its tensor's largest", True, 1),
    "sum": _Kind(
        "gradients added up and not divided by the number of ranks",
        False,
        2,
        "Adam divides a gradient by its own size, so the losses hardly show it, and the weights only where the tolerance is tight. "
        "The gradients themselves do.",
    ),
    "no_sync": _Kind(
        "gradients that are not averaged", False, 2, "Each rank follows its own gradient. Compare the gradients, or the weights."
    ),
    "stale": _Kind(
        "an optimizer that does not hold the model's tensors",
        False,
        1,
        "Its first gradients are right, since they come before the first step. Look at what training has changed: the weights.",
    ),
    "plain_head": _Kind(
        "blocks that are sharded and a head that is not",
        False,
        2,
        "Most gradients are right. Compare every name, not the first one, and not a mean over all.",
    ),
    "last_micro": _Kind(
        "a last micro-batch whose gradient is lost",
        False,
        1,
        "The losses of the first step are right. Its gradients are not.",
    ),
    "doubled": _Kind(
        "gradients twice as large, with the losses and weights of the reference",
        False,
        1,
        "Weights do not tell everything, since Adam takes a constant factor out. Compare the gradients too.",
    ),
    "misplaced_gradients": _Kind(
        "gradients one place further, with the losses and weights of the reference",
        False,
        1,
        "Compare the gradients element by element. In a sum or a mean of differences, plus and minus cancel.",
    ),
    "misplaced_weights": _Kind(
        "weights one place further, with the losses and gradients of the reference",
        False,
        1,
        "Compare the weights element by element. In a sum or a mean of differences, plus and minus cancel.",
    ),
    "misplaced_losses": _Kind(
        "losses one place further, with the gradients and weights of the reference",
        False,
        1,
        "Compare the losses too, each with its own: gradients and weights do not show which losses were recorded.",
    ),
    "decay": _Kind(
        "AdamW instead of Adam",
        False,
        1,
        "AdamW also shrinks the weights, by a ten-thousandth a step. The losses hardly show it. The weights end up a thousandth of "
        "their tensor's largest apart, hundreds of times the noise: a tolerance can lie between the two.",
    ),
}


def check_same_training(pool: Pool, *, timeout_s: float = 20.0) -> str:
    """Exercise 4: ``same_training(run, reference)`` accepts another order of sums and refuses ten bugs.

    Besides the reference, the ranks actually make eight runs. Six more are copies of the reference, five of them with something
    planted: noise that works for any number of ranks, and differences that a judge overlooks if it compares only one part, or only
    sums. A run is accepted if every rank accepts its part. The ranks keep the runs for the next attempt.

    Args:
        pool: The pool; ``same_training`` is defined on its ranks.
        timeout_s: Seconds after which a rank counts as hung.

    Returns:
        A line with the number of runs, and the number that need more ranks.

    Raises:
        ExerciseError: A verdict is wrong (the message names the run), or the judge hangs, raises or gives no verdict.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    require_on_ranks(pool, "same_training")
    shown = [name for name, kind in _KINDS.items() if pool.world_size >= kind.needs]
    try:
        verdicts = run_on_ranks(pool, _verdicts, shown, timeout_s=timeout_s)
    except RunTimeoutError as error:
        refuse_hang(
            "same_training",
            error,
            "a verdict on every rank.",
            "Each rank judges what it saw itself. If you call a collective, every rank has to reach it in every run.",
        )
    for name in shown:
        kind = _KINDS[name]
        accepted = all(verdict[name] for verdict in verdicts.values())
        if accepted != kind.same:
            said = "accepted" if accepted else f"refused by rank {next(r for r, v in verdicts.items() if not v[name])}"
            hint = kind.hint or _hint_for_noise(near_zero=all(verdict[_LAST_PLACES] for verdict in verdicts.values()))
            refuse(f"{kind.what}: {said}.", "accepted." if kind.same else "refused by at least one rank.", hint)
    bugs = sum(not _KINDS[name].same for name in shown)
    left_out = len(_KINDS) - len(shown)
    more = f" {left_out} of {len(_KINDS)} runs need two ranks and were left out." if left_out else ""
    return f"Solved: {len(shown) - bugs} right runs accepted, {bugs} bugs refused.{more}"


def _hint_for_noise(*, near_zero: bool) -> str:
    return (
        "You allow for the last place of each number. That is too tight near zero: noise in a sum is as large as the last place "
        "of its largest terms, whatever is left of them: a number near zero is off by many times its own last place. There rtol "
        "gives next to nothing, and the default atol=1e-8 is too little. Choose atol by the largest element of the tensor."
        if near_zero
        else "It adds the same numbers in another order, so the last bits differ. Exact equality is more than two right runs can "
        "promise, and so is a tolerance below the last place."
    )


# On the ranks -----------------------------------------------------------------------------------------------------------

# Used only for the hint: a judge that accepts this run allows for noise, but too little of it near zero.
_LAST_PLACES = "last_places"


def _verdicts(kinds: list[str]) -> dict[str, bool]:
    reference = trained(["reference"])["reference"]
    # Run this before the long part, to see whether it is solved at all.
    verdicts = {kinds[0]: _verdict(_KINDS[kinds[0]].what, copied(reference), reference)}
    runs = trained([kind for kind in kinds if kind not in PLANTED])
    for kind in kinds[1:]:
        run = planted(kind, copied(reference)) if kind in PLANTED else copied(runs[kind])
        verdicts[kind] = _verdict(_KINDS[kind].what, run, reference)
    run = planted(_LAST_PLACES, copied(reference))
    return verdicts | {_LAST_PLACES: _verdict("the reference with other last places", run, reference)}


def _verdict(what: str, run: Run, reference: Run) -> bool:
    import torch

    answer: Any = ask(from_cell("same_training"), run, copied(reference), case=what)
    is_flag = isinstance(answer, torch.Tensor) and answer.dtype == torch.bool and answer.numel() == 1
    if not is_flag and type(answer).__name__ not in ("bool", "bool_"):  # Python's, numpy's
        raise ExerciseError(f"{what}: same_training returned {answer!r:.80}. It has to return True or False.")
    return bool(answer)

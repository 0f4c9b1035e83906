"""Exercise 2 of notebook 02: hooks that move activations and leave weights alone."""

from __future__ import annotations

import sys

from labkit.course.labs.checks import Pool, hint_for, refuse, require_on_ranks, run_on_ranks
from labkit.course.labs.lab02.hooks_trial import HookEffects, try_hooks
from labkit.errors import ExerciseError


def check_hooks(pool: Pool, *, timeout_s: float = 60.0) -> str:
    """Exercise 2: ``make_hooks(model)`` returns ``pack`` and ``unpack`` that move all activations, no weight, and change nothing.

    On each rank they are tried on a model that saves weights unchanged, as views and in parts, activations that look like weights,
    two views of the same memory, and two dtypes; on reused memory; and on a GPU tensor without data.

    Args:
        pool: The pool; ``make_hooks`` is defined on its ranks.
        timeout_s: Seconds after which a rank counts as hung.

    Returns:
        A line with the bytes that moved.

    Raises:
        ExerciseError: The hooks moved, kept or changed something they should not; the message names it.

    Ranks: controller.
    """
    require_on_ranks(pool, "make_hooks")
    try:
        tried = run_on_ranks(pool, try_hooks, timeout_s=timeout_s)
        for rank, seen in tried.items():
            _judge(rank, seen)
    except ExerciseError as error:
        if not hasattr(sys.modules["__main__"], "make_hooks"):
            raise
        raise ExerciseError(f"{error}\n{_ANOTHER}") from None
    did, first = "moved" if pool.device == "cuda" else "copied", tried[0]
    return (
        f"Solved: on every rank {first.num_activations} activations with {first.moved_bytes:,} bytes {did}, no weight was, and all "
        "gradients are equal bit for bit."
    )


_ANOTHER = (
    "This is about the make_hooks of the ranks. There is another one in the notebook, from a cell that ran without %%spmd in its "
    "first line."
)


def _judge(rank: int, seen: HookEffects) -> None:
    if seen.error:
        refuse(f"The hooks raised on rank {rank}: {seen.error}.", "forward and backward run.", hint_for(seen.error, _ERRORS))
    if seen.changed:
        hint = _MIXED_UP.get(seen.mixed_up, _CHANGED)
        refuse(f"A saved tensor came back changed on rank {rank}: {seen.changed}.", "the same dtype, shape and values.", hint)
    if seen.moved_weights:
        hint = _NO_WEIGHT_STAYS if not seen.kept_weights else _PARTS if seen.moves_parts_only else _VIEWS
        refuse(f"{seen.moved_weights:,} bytes of weights moved on rank {rank}.", "0.", hint)
    if seen.kept_activations:
        hint = hint_for(seen, _STAYED, _SAME_MEMORY)
        refuse(f"{seen.kept_activations:,} bytes of activations did not move on rank {rank}.", "0.", hint)
    if seen.wrong_gradients:
        refuse(f"{seen.wrong_gradients} gradients differ on rank {rank}.", "all are equal bit for bit.")
    if seen.leaves_device is False:
        refuse(
            "pack was given a tensor of a GPU (one without data), and what it returns is still on the GPU.",
            "on the host.",
            "A clone is a copy on the same device. It frees nothing there: say where the copy is to go.",
        )


_NO_WEIGHT_STAYS = (
    "Weights stay on the device anyway: a copy costs time and memory and saves nothing. Tell them apart in pack, by the memory "
    "behind them."
)
_VIEWS = (
    "Some stayed, so you tell weights apart. But most are saved as a view of themselves, transposed for example: another tensor, "
    "of another shape, over the same memory. Compare the memory behind it."
)
_PARTS = (
    "These are saved as a part of a weight, which begins further on in the weight's memory: data_ptr() says where a tensor begins, "
    "and not whose memory it is. Compare the memory as a whole, untyped_storage()."
)
_SAME_MEMORY = (
    "They came back as the very same memory, so nothing was freed. On a CPU tensor.cpu() and tensor.to('cpu') copy nothing; ask "
    "for a copy."
)
_STAYED = [
    (
        lambda seen: seen.looks_like_weights,
        "An activation can have the shape of a weight, and these have. Tell weights apart by the memory behind them.",
    ),
    (
        lambda seen: seen.copies_others,
        "You do copy, and a tensor that has nothing to do with the model was copied. But your test for a weight takes these "
        "activations for weights too: what is computed from weights needs a gradient as they do. Compare the memory behind it.",
    ),
    (
        lambda seen: seen.leaves_device is False,
        "pack leaves every tensor where it is, even one that has nothing to do with the model: they came back as the very same "
        "memory. Return a copy on the host, and what unpack needs to bring it back.",
    ),
]
_CHANGED = (
    "A tensor has to come back with the dtype, the shape and the values that it left with, also one that pack left where it was. "
    "Gradients are exact or wrong."
)
_MIXED_UP = {
    "views": "Two tensors can be views of one piece of memory, with different shapes. The memory alone does not identify a tensor.",
    "reused": "Memory that is freed during forward is used again for the next tensor. An address does not identify a tensor.",
}
_ERRORS = [
    (lambda text: "make_hooks returned" in text, "Return the two functions: return pack, unpack."),
    (lambda text: "device" in text, "A tensor has to come back to the device that it left."),
]

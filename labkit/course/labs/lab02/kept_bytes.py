"""Exercise 1 of notebook 02: the number of bytes that autograd keeps of a feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from labkit.course.labs.checks import Pool, ask, from_cell, hint_for, refuse
from labkit.errors import ExerciseError

_TABLE_ROWS = 10  # of the layer whose tensors the notebook shows
_SIZES = ((6, 8, 20, 4), (3, 4, 8, 8), (16, 12, 4, 4), (5, 8, 24, 2))


@dataclass(frozen=True)
class _Case:
    """A layer that was run, and the answer for it."""

    rows: int
    dim: int
    hidden: int
    bytes_each: int
    truth: int
    answer: int

    @property
    def x(self) -> int:
        return self.rows * self.dim * self.bytes_each

    @property
    def h(self) -> int:
        return self.rows * self.hidden * self.bytes_each

    @property
    def weights(self) -> int:
        return 3 * self.dim * self.hidden * self.bytes_each


def check_kept_bytes(pool: Pool, kept_bytes: Callable[[int, int, int, int], Any]) -> str:
    """Exercise 1: ``kept_bytes(rows, dim, hidden, bytes_each)`` gives the bytes that a feed-forward layer keeps for backward.

    Layers of four sizes and three dtypes are run on rank 0, and the bytes that autograd saves are counted there.

    Args:
        pool: The pool.
        kept_bytes: Returns the bytes of all kept storages, each counted once, without weights.

    Returns:
        A line with the bytes that were counted.

    Raises:
        ExerciseError: An answer differs; the message shows the case and the difference.

    Ranks: controller.
    """
    counted = pool.run(_count, _SIZES, ranks=[0], timeout_s=60.0)[0]
    cases = [_Case(*sizes, truth, _number(ask(kept_bytes, *sizes))) for sizes, truth in zip(_SIZES, counted, strict=True)]
    for case in cases:
        if case.answer != case.truth:
            refuse(
                f"kept_bytes(rows={case.rows}, dim={case.dim}, hidden={case.hidden}, bytes_each={case.bytes_each}) is "
                f"{case.answer:,}, {abs(case.answer - case.truth):,} too {'many' if case.answer > case.truth else 'few'}.",
                f"{case.truth:,}, as counted on rank 0.",
                hint_for(
                    cases,
                    _MISTAKES,
                    "List the operations of forward. For each: which of its inputs or results does its gradient need?",
                ),
            )
    return f"Solved: {len(cases)} layers, {sum(counted):,} bytes counted, all as predicted."


def _always(difference: Callable[[_Case], float]) -> Callable[[list[_Case]], bool]:
    return lambda cases: all(case.answer == case.truth + difference(case) for case in cases)


_MISTAKES = [
    (
        lambda cases: all(case.answer * case.bytes_each == case.truth for case in cases),
        "That is the number of elements. Each takes bytes_each bytes.",
    ),
    (
        lambda cases: all((case.answer == case.truth) is (case.bytes_each == 4) for case in cases),
        "This is right for 4-byte numbers only. Each number takes bytes_each bytes.",
    ),
    (
        _always(lambda case: case.x),
        "There is one tensor of the shape of x too many. x is saved twice, by w1 and by w3, but it is one piece of memory and kept "
        "once; and the result of w2, which has that shape too, is not kept at all.",
    ),
    (
        _always(lambda case: case.weights),
        "Backward needs the weights too, but they are there anyway: keeping them costs nothing more.",
    ),
    (
        _always(lambda case: case.x + case.weights),
        "That is what is saved, counted as often as it is saved. Weights are there anyway, and x is one tensor.",
    ),
    (
        lambda cases: all(case.answer in (case.truth - case.h, case.truth - 2 * case.h, case.truth - 3 * case.h) for case in cases),
        "A hidden tensor is missing. silu needs its input; the product needs both factors; w2 needs its own input.",
    ),
    (
        _always(lambda case: -case.x),
        "x is missing: the gradients of w1 and w3 need it.",
    ),
    (
        lambda cases: all(case.answer * case.rows == case.truth * _TABLE_ROWS for case in cases),
        f"This is right for {_TABLE_ROWS} rows, as in the table. The argument rows says how many there are.",
    ),
    (
        # The result of w2 has the shape of x.
        lambda cases: all(case.answer in (case.truth + 2 * case.x, case.truth + case.x + case.h) for case in cases),
        "The result of the layer is not needed for its own gradient: a linear map needs its input and its weight.",
    ),
]


def _number(answer: Any) -> int:
    if isinstance(answer, bool) or not isinstance(answer, int | float) or not isfinite(answer) or answer % 1:
        raise ExerciseError(f"kept_bytes returned {answer!r}. It has to return a whole number of bytes.")
    return int(answer)


def _count(sizes: tuple[tuple[int, int, int, int], ...]) -> list[int]:
    import torch

    from labkit.spmd.model.transformer import FeedForward, ModelConfig
    from labkit.spmd.offload.context import ActivationOffload
    from labkit.spmd.offload.transfer import CountingTransfer

    device = from_cell("device")
    dtypes = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    counted = []
    for rows, dim, hidden, bytes_each in sizes:
        dtype = dtypes[bytes_each]
        layer = FeedForward(ModelConfig(dim=dim, hidden_dim=hidden, num_heads=2)).to(device, dtype)
        with ActivationOffload([layer], min_bytes=1, transfer=CountingTransfer()) as offload:
            layer(torch.ones(1, rows, dim, device=device, dtype=dtype).requires_grad_()).sum().backward()
        counted.append(offload.counts.moved_bytes)
    return counted

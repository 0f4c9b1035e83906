"""Exercise 1 of notebook 01: the rows of a sharded tensor on each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from labkit.course.labs.checks import Pool, ask, from_cell, hint_for, refuse

Span = tuple[int, int]
ChunkRows = Callable[[int, int, int], Span]

_MOST_ROWS, _MOST_RANKS = 20, 8


def check_chunk_rows(pool: Pool, chunk_rows: ChunkRows, *, timeout_s: float = 60.0) -> str:
    """Exercise 1: ``chunk_rows(num_rows, num_ranks, rank)`` predicts the rows that a DTensor puts on a rank.

    The predictions are compared with real DTensors on this pool and, for other numbers of ranks, with `torch.chunk`, whose rule
    DTensor follows.

    Args:
        pool: The pool.
        chunk_rows: Returns the first row and the row after the last; equal if the rank holds nothing.
        timeout_s: Seconds after which a rank counts as hung.

    Returns:
        A line with the number of predictions.

    Raises:
        ExerciseError: A prediction is wrong, or the function raises. The message shows one case and how many rows it is off by.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    truth = pool.run(_rows_on_ranks, pool.world_size, timeout_s=timeout_s).same()
    for (num_rows, num_ranks), spans in truth.items():
        predicted = [_as_span(ask(chunk_rows, num_rows, num_ranks, rank)) for rank in range(num_ranks)]
        for rank, (guess, fact) in enumerate(zip(predicted, spans, strict=True)):
            if guess != fact and not (_is_empty(guess) and _is_empty(fact)):
                _refuse_rows(num_rows, num_ranks, rank, predicted, spans, pool.world_size)
    num_real = _MOST_ROWS * pool.world_size
    return f"Solved: {sum(map(len, truth.values()))} predictions, all right; {num_real} of them are for real DTensors on this pool."


def _as_span(prediction: Any) -> Span:
    if not isinstance(prediction, tuple | list) or len(prediction) != 2 or any(type(row) is not int for row in prediction):
        hint = "Rows are counted in whole numbers: // divides and rounds down, / gives a float." if "." in repr(prediction) else ""
        refuse(f"chunk_rows returned {prediction!r:.120}.", "two whole numbers: the first row, and the row after the last.", hint)
    return prediction[0], prediction[1]


def _is_empty(span: Span) -> bool:
    return span[0] == span[1]


def _refuse_rows(
    num_rows: int, num_ranks: int, rank: int, predicted: Sequence[Span], spans: Sequence[Span], world_size: int
) -> NoReturn:
    (first, stop), (true_first, true_stop) = predicted[rank], spans[rank]
    off = (stop - first) - (true_stop - true_first)
    gap = (
        f"{abs(off)} {'row' if abs(off) == 1 else 'rows'} too {'many' if off > 0 else 'few'}"
        if off
        else "the right number, elsewhere"
    )
    rows = f"{num_rows} {'row' if num_rows == 1 else 'rows'}"
    refuse(
        f"{rows} on {num_ranks} ranks: you predict {_rows(predicted[rank])} for rank {rank}, {gap}.",
        f"{_rows(spans[rank])} on rank {rank}.",
        hint_for(
            list(predicted),
            [
                (
                    lambda rows: num_ranks != world_size and rows == _capped(num_rows, world_size, num_ranks),
                    f"You cut for {world_size} ranks, the pool's world_size. num_ranks says how many there are in the case.",
                ),
                *((rule(num_rows, num_ranks, spans).__eq__, hint) for rule, hint in _WRONG_RULES),
            ],
            "Draw the case as the picture does, and go through the ranks from 0 on: which ones still find rows?",
        ),
    )


def _rows(span: Span) -> str:
    first, stop = span
    if first == stop:
        return "no row"
    if stop < first:
        return f"the slice {first}:{stop}"
    return f"row {first}" if stop == first + 1 else f"rows {first} to {stop - 1}"


def _balanced(num_rows: int, num_ranks: int, _: Sequence[Span]) -> list[Span]:
    size, rest = divmod(num_rows, num_ranks)
    starts = [rank * size + min(rank, rest) for rank in range(num_ranks + 1)]
    return list(pairwise(starts))


def _rounded_down(num_rows: int, num_ranks: int, _: Sequence[Span]) -> list[Span]:
    size = num_rows // num_ranks
    return [(rank * size, num_rows if rank == num_ranks - 1 else (rank + 1) * size) for rank in range(num_ranks)]


def _rest_lost(num_rows: int, num_ranks: int, _: Sequence[Span]) -> list[Span]:
    size = num_rows // num_ranks
    return [(rank * size, (rank + 1) * size) for rank in range(num_ranks)]


def _beyond_the_end(num_rows: int, num_ranks: int, _: Sequence[Span]) -> list[Span]:
    size = -(-num_rows // num_ranks)
    return [(rank * size, (rank + 1) * size) for rank in range(num_ranks)]


def _start_beyond_the_end(num_rows: int, num_ranks: int, _: Sequence[Span]) -> list[Span]:
    size = -(-num_rows // num_ranks)
    return [(rank * size, min((rank + 1) * size, num_rows)) for rank in range(num_ranks)]


def _capped(num_rows: int, num_pieces: int, num_ranks: int) -> list[Span]:
    """Return the correct rule's spans for ``num_pieces`` when ``num_ranks`` are asked for."""
    size = -(-num_rows // num_pieces)
    return [(min(rank * size, num_rows), min((rank + 1) * size, num_rows)) for rank in range(num_ranks)]


_DOWN = "You round the size of a piece down. In the picture the pieces before the last are all as large as the first."
_CAP = "No piece can begin or end after the last row: cap both numbers at num_rows."
_WRONG_RULES: tuple[tuple[Callable[[int, int, Sequence[Span]], list[Span]], str], ...] = (
    (_balanced, "You spread the rest evenly. DTensor does not balance: each rank takes a full piece until the rows run out."),
    (_rounded_down, _DOWN),
    (_rest_lost, _DOWN),
    (_beyond_the_end, _CAP),
    (_start_beyond_the_end, _CAP),
    (
        lambda n, k, spans: [(first, stop - 1) for first, stop in spans],
        "The second number is the row after the last, as in a slice.",
    ),
    (lambda n, k, spans: [(first, stop - first) for first, stop in spans], "The second number is a row, not a count of rows."),
)


def _rows_on_ranks(world_size: int) -> dict[tuple[int, int], list[Span]]:
    """Return each rank's rows by (rows, ranks): from real DTensors for ``world_size`` ranks, else from torch.chunk."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(from_cell("device").type, (world_size,))
    mine: dict[int, Span] = {}
    for num_rows in range(1, _MOST_ROWS + 1):
        rows = torch.arange(num_rows, device=from_cell("device"))
        held = distribute_tensor(rows, mesh, [Shard(0)]).to_local().tolist()
        mine[num_rows] = (held[0], held[-1] + 1) if held else (num_rows, num_rows)
    gathered: list[dict[int, Span]] = [{} for _ in range(world_size)]
    dist.all_gather_object(gathered, mine)

    found: dict[tuple[int, int], list[Span]] = {}
    # Begin with 10 rows on 4 ranks: the notebook shows that case, so its message is the easiest to understand.
    cases = [(10, 4), *((num_rows, num_ranks) for num_ranks in range(1, _MOST_RANKS + 1) for num_rows in range(1, _MOST_ROWS + 1))]
    for num_rows, num_ranks in [*cases, *((num_rows, world_size) for num_rows in range(1, _MOST_ROWS + 1))]:
        if num_ranks == world_size:
            found[num_rows, num_ranks] = [rows_of[num_rows] for rows_of in gathered]
        else:
            pieces = [piece.tolist() for piece in torch.arange(num_rows).chunk(num_ranks)]
            spans = [(piece[0], piece[-1] + 1) for piece in pieces]
            found[num_rows, num_ranks] = spans + [(num_rows, num_rows)] * (num_ranks - len(spans))
    return found

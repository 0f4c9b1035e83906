"""The mapping of FSDP1's arguments is complete, and the pictures of a migration agree with their data."""

from __future__ import annotations

import inspect

import pytest
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

from labkit.notebook.pictures.flat_maps import flat_map
from labkit.notebook.pictures.losses import loss_curves
from labkit.notebook.pictures.mappings import mapping_picture
from labkit.spmd.shards.records import Chunk, FlatShare, ShardRecord
from labkit.spmd.trace.fsdp_mapping import ARGUMENTS


def test_every_argument_of_fsdp1_is_in_the_mapping_once() -> None:
    arguments = set(inspect.signature(FullyShardedDataParallel.__init__).parameters) - {"self", "module"}
    assert {move.old for move in ARGUMENTS} == arguments
    assert len(ARGUMENTS) == len(arguments)


def test_every_target_is_an_argument_or_a_method_of_fsdp2_and_what_has_none_says_why() -> None:
    arguments = set(inspect.signature(fully_shard).parameters)
    for move in ARGUMENTS:
        if move.kind == "changed":
            assert move.new in arguments or hasattr(FSDPModule, move.new.removesuffix("()")), move
        else:
            assert move.new == "", move
        assert move.note


def test_the_mapping_s_picture_counts_each_kind_and_carries_the_notes() -> None:
    picture = mapping_picture(ARGUMENTS)
    assert picture.alt == (
        "Of 15 arguments of FSDP1, 9 have a successor that behaves differently, 4 became your own code, and 2 are gone."
    )
    assert len(picture.rows) == 15
    for move in ARGUMENTS:
        assert (move.old, move.new or picture.rows[[row[0] for row in picture.rows].index(move.old)][1]) in [
            row[:2] for row in picture.rows
        ]


def record(name: str, rows: int, start: int, count: int) -> ShardRecord:
    chunks = (Chunk((start, 0), (count, 2)),) if count else ()
    return ShardRecord(name, (rows, 2), "float32", ("Shard(dim=0)",), (2,), ("shard",), (0,), chunks, 8 * count)


SHARES = {
    0: [FlatShare("b", "b.q.weight", 6), FlatShare("b", "b.k.weight", 1), FlatShare("", "x.weight", 4)],
    1: [FlatShare("b", "b.q.weight", 0), FlatShare("b", "b.k.weight", 5), FlatShare("", "x.weight", 4)],
}
TABLES = {
    0: [record("b.q.weight", 3, 0, 2), record("b.k.weight", 3, 0, 2)],
    1: [record("b.q.weight", 3, 2, 1), record("b.k.weight", 3, 2, 1)],
}


def test_the_flat_map_tells_who_holds_how_much_of_each_parameter() -> None:
    picture = flat_map(SHARES, TABLES, unit="b")
    assert picture.rows == (
        ("q", "6", "rank 0: 6", "rank 0: 4, rank 1: 2"),
        ("k", "6", "rank 0: 1, rank 1: 5", "rank 0: 4, rank 1: 2"),
    )
    assert "1 parameter lies on several ranks" in picture.alt
    assert "2 parameters lie on several ranks" in picture.alt


def test_the_flat_map_refuses_another_unit_and_two_models_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="no parameter of FSDP1 unit 'c'"):
        flat_map(SHARES, TABLES, unit="c")
    with pytest.raises(ValueError, match="do not hold the same"):
        flat_map(SHARES, {rank: records[:1] for rank, records in TABLES.items()}, unit="b")


def test_loss_curves_give_the_distance_of_each_run_at_its_own_steps() -> None:
    picture = loss_curves([5.0, 4.0, 3.0], {"same": [4.0, 3.0], "other": [4.0, 3.5]}, first_step=7)
    assert picture.columns == ("step", "never stopped", "same", "other")
    assert picture.rows == (("8", "4.000000", "0", "0"), ("9", "3.000000", "0", "0.5"))
    assert "same is at most 0 away" in picture.alt
    assert "other is at most 0.5 away" in picture.alt


@pytest.mark.parametrize(
    "runs", [{}, {"a": [1.0] * 4}, {"a": [1.0], "b": [1.0, 2.0]}, {"a": []}, {str(n): [1.0] for n in range(8)}]
)
def test_loss_curves_refuse_what_cannot_be_drawn(runs: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="runs, all of the same length"):
        loss_curves([3.0, 2.0], runs)

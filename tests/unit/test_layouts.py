from __future__ import annotations

import subprocess
import sys

import pytest

from labkit.spmd.shards.layouts import MeshRecord, Split, splits_of

MESH = MeshRecord(("dp", "tp"), (2, 3), (0, 1, 2, 3, 4, 5))


def test_a_rank_has_its_place_in_row_major_order() -> None:
    assert [MESH.coordinate(rank) for rank in (0, 2, 3, 5)] == [(0, 0), (0, 2), (1, 0), (1, 2)]


def test_the_places_follow_the_mesh_and_not_the_numbers_of_the_ranks() -> None:
    turned = MeshRecord(("tp", "dp"), (2, 2), (0, 2, 1, 3))
    assert turned.coordinate(2) == (0, 1)
    assert turned.groups("dp") == [(0, 2), (1, 3)]


def test_the_groups_of_an_axis_differ_in_this_axis_only() -> None:
    assert MESH.groups("tp") == [(0, 1, 2), (3, 4, 5)]
    assert MESH.groups("dp") == [(0, 3), (1, 4), (2, 5)]


def test_an_unknown_axis_names_those_that_exist() -> None:
    with pytest.raises(ValueError, match="has no axis 'pp', only dp, tp"):
        MESH.groups("pp")


@pytest.mark.parametrize(("axes", "ranks"), [(("dp",), (0, 1, 2, 3)), (("dp", "tp"), (0, 1, 2))])
def test_a_mesh_whose_parts_do_not_fit_is_refused(axes: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not match"):
        MeshRecord(axes, (2, 2), ranks)


def test_placements_are_read_as_torch_writes_them() -> None:
    torch_text = ("_StridedShard(dim=0, sf=2)", "Shard(dim=1)", "Replicate()")
    assert splits_of(torch_text) == (Split(0, strided=True), Split(1), Split(None))


def test_placements_are_what_torch_writes() -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    texts = [repr(placement) for placement in (_StridedShard(1, split_factor=2), Shard(0), Replicate())]
    assert splits_of(texts) == (Split(1, strided=True), Split(0), Split(None))


@pytest.mark.parametrize("text", ["Partial(sum)", "ShardedTensor"])
def test_a_placement_that_names_no_part_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="does not say which part"):
        splits_of([text])


def test_layouts_need_no_torch() -> None:
    code = "import sys, labkit.spmd.shards.layouts; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert run.stdout.strip() == "False"

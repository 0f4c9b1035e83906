"""The picture of meshes on machines: the links between nodes, and layouts that cannot be drawn."""

from __future__ import annotations

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import same_color
from matplotlib.patches import FancyArrowPatch, Patch

from labkit.notebook.pictures.node_maps import _BETWEEN, node_map, ring
from labkit.spmd.shards.layouts import MeshRecord

FSDP = MeshRecord(("shard",), (4,), (0, 1, 2, 3))
HSDP = MeshRecord(("replicate", "shard"), (2, 2), (0, 1, 2, 3))
TURNED = MeshRecord(("replicate", "shard"), (2, 2), (0, 2, 1, 3))


def test_links_between_nodes_are_counted_by_axis() -> None:
    picture = node_map({"FSDP": FSDP, "HSDP": HSDP, "turned": TURNED}, 2)
    assert picture.rows == (
        ("FSDP", "shard", "0-3", "2", "2"),
        ("HSDP", "replicate", "0, 2 | 1, 3", "0", "4"),
        ("HSDP", "shard", "0-1 | 2-3", "4", "0"),
        ("turned", "replicate", "0-1 | 2-3", "4", "0"),
        ("turned", "shard", "0, 2 | 1, 3", "0", "4"),
    )
    assert "FSDP: shard has the groups 0-3, with 2 links inside nodes and 2 between" in picture.alt


@pytest.mark.parametrize(("mesh", "between"), [(FSDP, 2), (HSDP, 4), (TURNED, 4)])
def test_each_link_between_nodes_is_a_line_of_its_own(mesh: MeshRecord, between: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def add(self: Axes, patch: Patch) -> Patch:
        if isinstance(patch, FancyArrowPatch) and same_color(patch.get_edgecolor(), _BETWEEN):
            drawn.append(repr(patch.get_path().vertices.tolist()))
        return add_patch(self, patch)

    add_patch = Axes.add_patch
    monkeypatch.setattr(Axes, "add_patch", add)
    node_map({"mesh": mesh}, 2)
    assert len(set(drawn)) == between


def test_a_rank_by_itself_has_no_link() -> None:
    assert ring((3,)) == []
    assert ring((3, 5)) == [(3, 5), (5, 3)]
    alone = MeshRecord(("replicate", "shard"), (2, 1), (0, 1))
    assert node_map({"alone": alone}, 1).rows[1] == ("alone", "shard", "0 | 1", "0", "0")


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(0, 1), (9, 1), (18, 9)])
def test_what_would_be_unreadable_is_refused(num_ranks: int, ranks_per_node: int) -> None:
    layouts = {"many": MeshRecord(("shard",), (num_ranks,), tuple(range(num_ranks)))} if num_ranks else {}
    with pytest.raises(ValueError, match="cannot be drawn"):
        node_map(layouts, ranks_per_node)

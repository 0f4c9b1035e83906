"""A picture of meshes on machines: each machine a box with its ranks, each process group a ring through them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from labkit.base.plain_text import format_ranks
from labkit.notebook.drawing.boxes import canvas
from labkit.notebook.drawing.style import FAINT, INK, MUTED, WIDTH_IN, Picture, figure, rank_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labkit.spmd.shards.layouts import MeshRecord

MAX_NODES = 8
MAX_RANKS_PER_NODE = 8

_PANEL_IN = 3.0
_TITLE_IN = 0.36
_NODE_IN = 0.46
_GAP_IN = 0.34
_LEFT_IN = 0.72
_KEY_IN = 0.3
_CHAR_IN = 0.056
# As in labkit.notebook.pictures.plans: the colours of traffic inside a node and between nodes.
_INSIDE, _BETWEEN = "#009E73", "#D55E00"
_LINES = ("solid", (0, (3.5, 1.8)), (0, (1, 1.4)))

Point = tuple[float, float]


def node_map(layouts: Mapping[str, MeshRecord], ranks_per_node: int, *, caption: str = "") -> Picture:
    """Draw which ranks communicate: for each layout, the nodes with their ranks and the rings of every axis of its mesh.

    Args:
        layouts: Meshes by the name under which they are drawn, all over the same ranks.
        ranks_per_node: Ranks ``0 .. ranks_per_node - 1`` are on node 0, and so on.
        caption: The line under the picture.

    Returns:
        The picture, with the groups and the number of their links between nodes as its table.

    Raises:
        ValueError: There is no layout, or there are more than `MAX_NODES` nodes or `MAX_RANKS_PER_NODE` ranks on a node.

    Ranks: controller.
    """
    num_ranks = max((len(mesh.ranks) for mesh in layouts.values()), default=0)
    num_nodes = -(-num_ranks // ranks_per_node)
    if not 0 < num_nodes <= MAX_NODES or ranks_per_node > MAX_RANKS_PER_NODE:
        raise ValueError(f"{len(layouts)} layouts of {num_ranks} ranks on {num_nodes} nodes cannot be drawn as a readable picture")
    panel_height = _TITLE_IN + num_nodes * _NODE_IN + (num_nodes - 1) * _GAP_IN + 0.24
    with figure(height_in=-(-len(layouts) // 2) * panel_height + _KEY_IN) as fig:
        ax = canvas(fig)
        for index, (name, mesh) in enumerate(layouts.items()):
            _draw_layout(ax, name, mesh, ranks_per_node, (index % 2 * _PANEL_IN, index // 2 * panel_height + 0.04))
        _draw_key(ax, fig.get_figheight() - _KEY_IN / 2)
        return Picture.from_figure(
            fig,
            alt=_alt(layouts, ranks_per_node),
            caption=caption
            or "Boxes are nodes. A line is one link of a ring along which a group passes its data. Two ranks have a link each way.",
            columns=("layout", "axis", "groups", "links inside nodes", "links between nodes"),
            rows=[
                (name, axis, _names(mesh, axis), *map(str, _count(mesh, axis, ranks_per_node)))
                for name, mesh in layouts.items()
                for axis in mesh.axes
            ],
        )


def ring(group: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the links of a ring: each rank with the next one, and the last with the first; none for a single rank."""
    return [*pairwise(group), (group[-1], group[0])] if len(group) > 1 else []


def _draw_layout(ax: Axes, name: str, mesh: MeshRecord, ranks_per_node: int, corner: Point) -> None:
    from matplotlib.patches import FancyBboxPatch

    left, top = corner
    ax.text(left + 0.08, top + 0.09, name, va="center", weight="bold", fontsize=9)
    axes = [axis for axis, size in zip(mesh.axes, mesh.shape, strict=True) if size > 1]
    ax.text(left + 0.08, top + 0.24, _words(mesh, axes), va="center", fontsize=6.8, color=MUTED)
    wide = (_PANEL_IN - _LEFT_IN - 0.3) / ranks_per_node
    places: dict[int, Point] = {}
    for node in range(-(-len(mesh.ranks) // ranks_per_node)):
        y = top + _TITLE_IN + node * (_NODE_IN + _GAP_IN)
        box = FancyBboxPatch(
            (left + _LEFT_IN, y),
            wide * ranks_per_node,
            _NODE_IN,
            boxstyle="round,pad=0,rounding_size=0.08",
            fc=FAINT,
            ec=MUTED,
            lw=0.8,
        )
        ax.add_patch(box)
        ax.text(left + _LEFT_IN - 0.08, y + _NODE_IN / 2, f"node {node}", ha="right", va="center", fontsize=8)
        for place in range(ranks_per_node):
            places[node * ranks_per_node + place] = (left + _LEFT_IN + (place + 0.5) * wide, y + _NODE_IN / 2)
    for line, axis in zip(_LINES, axes, strict=False):
        for group in mesh.groups(axis):
            for one, other in ring(group):
                crosses = one // ranks_per_node != other // ranks_per_node
                step = (wide, _NODE_IN + _GAP_IN)
                _draw_link(ax, places[one], places[other], line, crosses=crosses, pair=len(group) == 2, step=step)
    for rank in mesh.ranks:
        _draw_rank(ax, rank, places[rank], min(0.15, wide * 0.4))


def _draw_rank(ax: Axes, rank: int, place: Point, radius: float) -> None:
    from matplotlib.patches import Circle

    style = rank_style(rank)
    ax.add_patch(Circle(place, radius, fc=style.color, ec=INK, lw=0.8, zorder=3))
    ax.text(*place, str(rank), ha="center", va="center", color=style.text_color, fontsize=8, weight="bold", zorder=4)


def _draw_link(ax: Axes, start: Point, end: Point, line: object, *, crosses: bool, pair: bool, step: Point) -> None:
    from matplotlib.patches import FancyArrowPatch

    # Draw a straight link if nothing lies between, else an arc. A group of two ranks is a ring of two links, side by side.
    far = abs(start[1] - end[1]) > 1.5 * step[1] or (start[1] == end[1] and abs(start[0] - end[0]) > 1.5 * step[0])
    link = FancyArrowPatch(
        start,
        end,
        connectionstyle=f"arc3,rad={0.28 if far else 0.2 if pair else 0}",
        arrowstyle="-",
        color=_BETWEEN if crosses else _INSIDE,
        ls=line,
        lw=2.2,
        shrinkA=0,
        shrinkB=0,
        zorder=2,
    )
    ax.add_patch(link)


def _draw_key(ax: Axes, y: float) -> None:
    x = 0.1
    for text, color, line in (
        ("inside a node", _INSIDE, _LINES[0]),
        ("between nodes", _BETWEEN, _LINES[0]),
        ("first axis", INK, _LINES[0]),
        ("second axis", INK, _LINES[1]),
    ):
        ax.plot((x, x + 0.36), (y, y), color=color, ls=line, lw=2.2)
        ax.text(x + 0.44, y, text, va="center", fontsize=7.5)
        x += WIDTH_IN / 4


def _words(mesh: MeshRecord, axes: list[str]) -> str:
    """Return the groups of each axis, or only their number and size if they do not fit."""
    text = "; ".join(f"{axis}: {_names(mesh, axis)}" for axis in axes) or "no groups"
    if len(text) * _CHAR_IN < _PANEL_IN - 0.2:
        return text
    return "; ".join(f"{axis}: {_num_groups(mesh, axis)} of {len(mesh.groups(axis)[0])}" for axis in axes)


def _num_groups(mesh: MeshRecord, axis: str) -> str:
    num = len(mesh.groups(axis))
    return f"{num} group{'s' if num > 1 else ''}"


def _names(mesh: MeshRecord, axis: str) -> str:
    groups = mesh.groups(axis)
    shown = " | ".join(format_ranks(group) for group in groups[:4])
    return shown if len(groups) <= 4 else f"{shown} | ... ({len(groups)} groups)"


def _count(mesh: MeshRecord, axis: str, ranks_per_node: int) -> tuple[int, int]:
    links = [link for group in mesh.groups(axis) for link in ring(group)]
    between = sum(one // ranks_per_node != other // ranks_per_node for one, other in links)
    return len(links) - between, between


def _alt(layouts: Mapping[str, MeshRecord], ranks_per_node: int) -> str:
    told = []
    for name, mesh in layouts.items():
        parts = []
        for axis in mesh.axes:
            inside, between = _count(mesh, axis, ranks_per_node)
            parts.append(f"{axis} has the groups {_names(mesh, axis)}, with {inside} links inside nodes and {between} between")
        told.append(f"{name}: {'; '.join(parts)}")
    return "Nodes as boxes with ranks in them, groups as rings. " + ". ".join(told) + "."

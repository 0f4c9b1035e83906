"""A timeline of parameters: when each block's are gathered, when the collectives run, and how many bytes this keeps alive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from labkit.notebook.drawing.lanes import GATHER_MARK, MARKS, Lane, Period, PhaseSpan, lanes_of
from labkit.notebook.drawing.style import FAINT, INK, MUTED, WIDTH_IN, Picture, RankStyle, figure, rank_style

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from labkit.spmd.trace.events import Trace

MAX_LANES = 8
MAX_ROWS = 48

_LABEL_CHAR_IN = 0.083  # bold, 8 points
_NAME_CHAR_IN = 0.062
_PHASE_CHAR_IN = 0.07  # 7.5 points
_RIGHT_IN = 0.1
_ROW_IN = 0.15
_LANE_GAP_IN = 0.1
_PHASE_NAMES_IN = 0.11
_ELSEWHERE = 0.05  # fraction of the axis: a phase that begins this far from the named one needs its own name
_HEAD_IN = 0.42
_BYTES_IN = 0.72
_FOOT_IN = 0.38
_DASHES = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))


def timeline(
    traces: Mapping[int, Trace] | Mapping[str, Trace],
    *,
    by: Literal["order", "time"] = "order",
    caption: str = "",
) -> Picture:
    """Draw when the parameters of each block are gathered.

    Each lane is one trace, each row in it one block. A bar begins where the gathering of the block's parameters begins, and ends
    where they are freed. Its dark part is the block's own forward or backward. Below are the bytes that this keeps alive.

    Args:
        traces: The result of ``pool.run`` or a ``%%spmd --out`` cell with `labkit.spmd.record_events`, by rank; or several traces
            under names of your own, to compare them. Up to `MAX_LANES`.
        by: ``order``: one step per event, so that equal orders look equal. ``time``: milliseconds on the host; lanes from one
            machine share a clock.
        caption: The line under the picture; by default a sentence on how to read it.

    Returns:
        The picture, with a table of all bars.

    Raises:
        ValueError: There is no trace, or there are more lanes or rows than can be read.

    Ranks: controller.
    """
    lanes = lanes_of(traces, by)
    rows = sum(len(lane.rows) for lane in lanes)
    if not 1 <= len(lanes) <= MAX_LANES or rows > MAX_ROWS:
        raise ValueError(
            f"{len(lanes)} lanes with {rows} rows cannot be read; choose up to {MAX_LANES} ranks and {MAX_ROWS} blocks in all."
        )
    left_in = _left_in(lanes)
    gaps_in = _gaps(lanes)
    lanes_in = rows * _ROW_IN + sum(gaps_in)
    with figure(height_in=_HEAD_IN + lanes_in + _BYTES_IN + _FOOT_IN) as fig:
        fig.set_layout_engine("none")
        end = max(lane.end for lane in lanes)
        _draw_lanes(_axes(fig, left_in, _BYTES_IN + _FOOT_IN, lanes_in, end), lanes, gaps_in, left_in)
        _draw_bytes(_axes(fig, left_in, _FOOT_IN, _BYTES_IN - 0.08, end), lanes, by)
        _draw_legend(fig, lanes, left_in)
        columns = ("lane", "block", "gathered in", "from", "whole from", "freed at", "bytes")
        unit = "ms" if by == "time" else "event"
        return Picture.from_figure(
            fig,
            alt=_alt(lanes),
            caption=caption or _caption(by),
            columns=tuple(f"{column} ({unit})" if column in ("from", "whole from", "freed at") else column for column in columns),
            rows=_table(lanes, by) or [("-",) * len(columns)],
        )


def _left_in(lanes: Sequence[Lane]) -> float:
    """Return the room for the longest label and the longest name of a row, in inches."""
    label = max(len(lane.label) for lane in lanes) * _LABEL_CHAR_IN
    name = max(len(name) for lane in lanes for name in lane.short_names or ("",)) * _NAME_CHAR_IN
    return float(0.05 + label + 0.12 + name + 0.1)


def _axes(fig: Figure, left_in: float, bottom_in: float, height_in: float, end: float) -> Axes:
    width, height = fig.get_size_inches()
    box = (left_in / width, bottom_in / height, (width - left_in - _RIGHT_IN) / width, height_in / height)
    axes = fig.add_axes(box)
    axes.set_xlim(0, end)
    return axes


# Lanes ------------------------------------------------------------------------------------------------------------------


def _gaps(lanes: Sequence[Lane]) -> list[float]:
    """Return the space above each lane in inches: more if its phases do not begin where those of the last named lane do."""
    end = max((lane.end for lane in lanes), default=0.0)
    gaps: list[float] = []
    named: list[PhaseSpan] = []
    for number, lane in enumerate(lanes):
        same = [phase.name for phase in lane.phases] == [phase.name for phase in named] and all(
            abs(phase.begin - other.begin) <= _ELSEWHERE * end for phase, other in zip(lane.phases, named, strict=True)
        )
        named = named if same else lane.phases
        gaps.append(_LANE_GAP_IN + (0.0 if same or number == 0 else _PHASE_NAMES_IN))
    return gaps


def _draw_lanes(axes: Axes, lanes: Sequence[Lane], gaps_in: Sequence[float], left_in: float) -> None:
    axes.set_ylim(sum(len(lane.rows) * _ROW_IN for lane in lanes) + sum(gaps_in), 0)  # inches from the top
    axes.axis("off")
    top = 0.0
    for number, (lane, gap) in enumerate(zip(lanes, gaps_in, strict=True)):
        top += gap
        _draw_phases(axes, lane, top, with_names=number == 0 or gap > _LANE_GAP_IN)
        style = rank_style(lane.rank)
        height = len(lane.rows) * _ROW_IN
        _text_at_left(axes, left_in, 0.05, top + height / 2, lane.label, weight="bold", fontsize=8, ha="left")
        for row, name in enumerate(lane.rows):
            middle = top + (row + 0.5) * _ROW_IN
            axes.plot([0, axes.get_xlim()[1]], [middle, middle], color=FAINT, lw=0.6, zorder=0)
            _text_at_left(axes, left_in, left_in - 0.07, middle, lane.short_names[row], fontsize=6.5, ha="right", color=INK)
            for period in lane.periods:
                if period.block == name:
                    _draw_period(axes, period, middle, style)
            for mark in lane.marks:
                if mark.block == name:
                    _draw_mark(axes, mark.x, middle, mark.kind)
        top += height


def _text_at_left(axes: Axes, left_in: float, x_in: float, y: float, text: str, **how: object) -> None:
    """Write at a distance from the figure's left edge, in inches."""
    right = axes.get_xlim()[1]
    axes.text((x_in - left_in) / (WIDTH_IN - left_in - _RIGHT_IN) * right, y, text, va="center", clip_on=False, **how)  # type: ignore[arg-type]


def _draw_phases(axes: Axes, lane: Lane, top: float, *, with_names: bool) -> None:
    height = len(lane.rows) * _ROW_IN
    if with_names:
        _write_phases(axes, [phase for phase in lane.phases if phase.name != "outside"], top - 0.06)
    for phase in lane.phases:
        if phase.name == "backward":
            axes.fill_between([phase.begin, phase.end], top, top + height, color="#F3F3F3", lw=0, zorder=-1)
        if phase.begin > 0:
            axes.plot([phase.begin] * 2, [top - 0.03, top + height], color=MUTED, lw=0.7, ls=(0, (2, 2)), zorder=1)


def _write_phases(axes: Axes, phases: Sequence[PhaseSpan], y: float) -> None:
    """Write each name above the middle of its phase, or all names in one line if one does not fit."""
    step_in = axes.get_position().width * WIDTH_IN / axes.get_xlim()[1]
    if all(len(phase.name) * _PHASE_CHAR_IN <= (phase.end - phase.begin) * step_in for phase in phases):
        names = {(phase.begin + phase.end) / 2: (phase.name, "center") for phase in phases}
    else:
        names = {phases[0].begin: (", ".join(phase.name for phase in phases), "left")}
    for x, (text, where) in names.items():
        axes.text(x, y, text, ha=where, va="bottom", fontsize=7.5, color=INK)


def _draw_period(axes: Axes, period: Period, middle: float, style: RankStyle) -> None:
    from matplotlib.patches import Rectangle

    tall = _ROW_IN * 0.72
    y = middle - tall / 2
    axes.add_patch(Rectangle((period.begin, y), period.end - period.begin, tall, fc="white", ec=INK, lw=0.7, zorder=2))
    for begin, end in period.computes:
        axes.add_patch(Rectangle((begin, y), end - begin, tall, fc=style.color, ec=INK, lw=0.5, zorder=3))


def _draw_mark(axes: Axes, x: float, middle: float, kind: str) -> None:
    shape, filled = MARKS[kind]
    axes.plot(
        [x], [middle], marker=shape, ms=4.2, mfc=INK if filled else "white", mec=INK, mew=0.7, ls="none", clip_on=False, zorder=4
    )


# Bytes ------------------------------------------------------------------------------------------------------------------


def _draw_bytes(axes: Axes, lanes: Sequence[Lane], by: str) -> None:
    largest = max((level for lane in lanes for level in lane.levels), default=0)
    unit, size = ("MiB", 2**20) if largest >= 2 * 2**20 else ("KiB", 2**10)
    curves = {lane.label: (lane.xs, lane.levels) for lane in lanes}
    same = len({(tuple(xs), tuple(levels)) for xs, levels in curves.values()}) == 1
    for number, lane in enumerate(lanes[:1] if same else lanes):
        color = INK if same else rank_style(lane.rank).color
        heights = [level / size for level in lane.levels]
        axes.plot(lane.xs, heights, drawstyle="steps-post", color=color, lw=1.3, ls=_DASHES[number % 4], label=lane.label)
        if same:
            axes.fill_between(lane.xs, heights, step="post", color=FAINT, lw=0, zorder=0)
    # Leave room for the names above the curves.
    axes.set_ylim(0, largest / size * (1.15 if same else 1.6) or 1)
    axes.set_ylabel(f"live {unit}", fontsize=7.5)
    axes.tick_params(labelsize=7, length=2.5)
    axes.set_xlabel("events, in the order of each rank" if by == "order" else "milliseconds on the host", fontsize=7.5)
    axes.locator_params(axis="y", nbins=3)
    if not same:
        axes.legend(loc="upper right", fontsize=6.5, ncols=len(lanes), handlelength=2.6, borderpad=0.1, borderaxespad=0.1)


def _draw_legend(fig: Figure, lanes: Sequence[Lane], left_in: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colors = {rank_style(lane.rank).color for lane in lanes}
    color = colors.pop() if len(colors) == 1 else MUTED
    used = [kind for kind in MARKS if any(mark.kind == kind for lane in lanes for mark in lane.marks)]
    handles: list[Artist] = [
        Patch(fc="white", ec=INK, lw=0.7, label="whole"),
        Patch(fc=color, ec=INK, lw=0.5, label="in use"),
    ]
    for kind in used:
        shape, filled = MARKS[kind]
        handles.append(
            Line2D([], [], marker=shape, ms=4.5, mfc=INK if filled else "white", mec=INK, mew=0.7, ls="none", label=_words(kind))
        )
    fig.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(min(left_in / WIDTH_IN, 0.2) - 0.03, 1.0),
        ncols=len(handles),
        fontsize=7,
        handlelength=1.3,
        handletextpad=0.4,
        columnspacing=1.2,
        borderpad=0.2,
    )


# Words ------------------------------------------------------------------------------------------------------------------


def _words(kind: str) -> str:
    return kind.replace("_", "-")


def _caption(by: str) -> str:
    axis = "Each event takes one step." if by == "order" else "Times are those of the host."
    return f"Each row is a block, each bar the time its parameters are gathered or being gathered. {axis} Below: their bytes."


def _table(lanes: Sequence[Lane], by: str) -> list[tuple[str, ...]]:
    def number(x: float | None) -> str:
        if x is None:
            return "-"
        return f"{x:.2f}" if by == "time" else f"{x:g}"

    return [
        (
            lane.label,
            period.block,
            period.phase,
            number(None if period.open_left else period.begin),
            number(period.whole),
            number(None if period.open_right else period.end),
            f"{period.size_bytes:,}",
        )
        for lane in lanes
        for period in lane.periods
    ]


def _alt(lanes: Sequence[Lane]) -> str:
    first = lanes[0]
    names = ", ".join(lane.label for lane in lanes)
    sentences = [f"Timeline of {len(first.rows)} blocks in {len(lanes)} {'lane' if len(lanes) == 1 else 'lanes'}: {names}."]
    stories = {lane.label: _story(lane) for lane in lanes}
    if len(set(stories.values())) == 1:
        sentences.append(("Each lane: " if len(lanes) > 1 else "") + stories[first.label])
    else:
        sentences += [f"{label}: {story}" for label, story in stories.items()]
    return " ".join(sentences)


def _story(lane: Lane) -> str:
    counts = [f"{count} {_words(kind)}" for kind in MARKS if (count := sum(mark.kind == kind for mark in lane.marks))]
    gathers = sum(mark.kind == GATHER_MARK for mark in lane.marks)
    peak = max(lane.levels, default=0)
    return f"{', '.join(counts) or 'no collectives'}, at most {lane.most_whole} of {len(lane.rows)} blocks whole at once, " + (
        f"peak {peak:,} bytes." if gathers or peak else "nothing is gathered."
    )

from __future__ import annotations

import base64
import subprocess
import sys
import xml.dom.minidom
from dataclasses import replace
from typing import Literal

import pytest

from labkit.notebook.drawing.lanes import NO_BLOCK, lanes_of
from labkit.notebook.drawing.style import rank_style
from labkit.notebook.pictures.timelines import MAX_LANES, timeline
from labkit.spmd.trace import events as ev
from labkit.spmd.trace.events import Collective, Event, Phase, Trace, TracedBlock, first_difference, short_name

BLOCKS = (TracedBlock("root", 100, 50), TracedBlock("layers.0", 1000, 500), TracedBlock("layers.1", 1000, 500))
BYTES = {block.name: block.whole_bytes for block in BLOCKS}


def trace_of(words: str, rank: int = 0, start_s: float = 0.0) -> Trace:
    """A trace from words such as ``f U:layers.0 R:layers.0 b u:layers.0``: f and b begin a phase; u and r change nothing."""
    kinds = {"U": ev.UNSHARD, "W": ev.WAIT, "R": ev.RESHARD, "S": ev.REDUCE_SCATTER, "A": ev.ALL_REDUCE, "G": ev.ALL_GATHER}
    spans = {"F": "forward", "B": "backward"}
    events: list[Event] = []
    phase: Phase = "forward"
    for word in words.split():
        letter, _, block = word.partition(":")
        if not block:
            phase = "backward" if letter == "b" else "forward"
            continue
        at = 0.001 * len(events)
        if letter in spans:
            for edge in ("begin", "end"):
                events.append(Event(f"{spans[letter]}_{edge}", block, phase, True, 0, at, 0.0))
            continue
        kind, changes = kinds[letter.upper()], letter.isupper()
        is_collective = letter in "SAG"
        size = BYTES.get(block, 8) if changes and letter != "W" else 0
        events.append(Event(kind, block, phase, changes, size, at, 0.0005, 4 if is_collective else 0))
    return Trace(rank, 4, BLOCKS, tuple(events), start_s)


STEP = (
    "f U:root G:root W:root U:layers.0 G:layers.0 W:layers.0 F:layers.0 R:layers.0 U:layers.1 G:layers.1 W:layers.1 F:layers.1 "
    "R:layers.1 r:root b u:root U:layers.1 G:layers.1 W:layers.1 U:layers.0 G:layers.0 B:layers.1 R:layers.1 S:layers.1 "
    "W:layers.0 B:layers.0 R:layers.0 S:layers.0 R:root S:root"
)


# Records --------------------------------------------------------------------------------------------------------------


def test_the_order_holds_what_changed_something_and_nothing_else() -> None:
    trace = trace_of(STEP)
    assert trace.order(names=False, phase="backward") == ("U 1", "U 0", "R 1", "R 0", "R root")
    assert trace.order()[:3] == ("U root", "U layers.0", "R layers.0")
    assert trace.calls(ev.UNSHARD) == (6, 5)
    assert trace.calls(ev.RESHARD) == (6, 5)


def test_live_bytes_rise_with_unshards_and_end_at_zero() -> None:
    trace = trace_of(STEP)
    levels = trace.live_bytes()
    assert len(levels) == len(trace.events)
    assert levels[-1] == 0
    assert trace.peak_live_bytes == 2100


def test_a_block_that_was_whole_before_the_trace_counts_from_its_beginning() -> None:
    trace = trace_of("f U:layers.0 R:layers.0 R:root")
    assert trace.live_bytes() == (1100, 100, 0)


@pytest.mark.parametrize(("kind", "sent"), [(ev.ALL_GATHER, 300), (ev.REDUCE_SCATTER, 300), (ev.ALL_REDUCE, 600), ("broadcast", 0)])
def test_a_ring_sends_all_but_the_own_piece(kind: str, sent: int) -> None:
    assert Collective(kind, 400, 4, 0.0, 0.0).sent_bytes == sent
    assert Collective(kind, 400, 1, 0.0, 0.0).sent_bytes == 0


def test_counts_and_bytes_of_collectives_are_those_of_the_events() -> None:
    trace = trace_of(STEP)
    assert trace.counts() == {"all_gather": 5, "reduce_scatter": 3}
    assert [call.size_bytes for call in trace.collectives("layers.0")] == [1000, 1000, 1000]
    assert trace.sent_bytes == sum(3 * call.size_bytes // 4 for call in trace.collectives())
    assert str(trace) == f"rank 0: {len(trace.events)} events, 5 all_gather, 3 reduce_scatter"


@pytest.mark.parametrize(
    ("right", "words"),
    [
        (("U a", "U b"), ""),
        (("U a", "R a"), "event 2 is 'U b' in rank 0 and 'R a' in rank 1"),
        (("U a",), "rank 0 has 1 more, from event 2 on"),
        (("U a", "U b", "R b", "R a"), "rank 1 has 2 more, from event 3 on"),
    ],
)
def test_the_first_difference_of_two_orders_is_named(right: tuple[str, ...], words: str) -> None:
    assert first_difference({"rank 0": ("U a", "U b"), "rank 1": right}) == words


def test_short_names_keep_what_tells_blocks_apart() -> None:
    assert [short_name(name) for name in ("root", "layers.12", "layers.0, layers.1, layers.2")] == ["root", "12", "0-2"]


# Lanes ----------------------------------------------------------------------------------------------------------------


def test_a_bar_lasts_from_the_unshard_to_the_reshard_with_the_computation_inside() -> None:
    (lane,) = lanes_of({0: trace_of(STEP)}, "order")
    assert [(period.block, period.phase) for period in lane.periods] == [
        ("root", "forward"),
        ("layers.0", "forward"),
        ("layers.1", "forward"),
        ("layers.1", "backward"),
        ("layers.0", "backward"),
    ]
    for period in lane.periods:
        assert period.whole is None or period.begin <= period.whole <= period.end
        assert all(period.begin <= begin < end <= period.end for begin, end in period.computes)
    assert sum(len(period.computes) for period in lane.periods) == 4
    assert lane.most_whole == 3
    assert [(span.name) for span in lane.phases] == ["forward", "backward"]


def test_equal_orders_give_equal_lanes_whatever_the_times() -> None:
    slow = trace_of(STEP, rank=1)
    slow = replace(slow, events=tuple(replace(event, began_s=7 * event.began_s) for event in slow.events))
    left, right = lanes_of({0: trace_of(STEP), 1: slow}, "order")
    assert (left.periods, left.marks, left.xs, left.levels) == (right.periods, right.marks, right.xs, right.levels)


def test_lanes_by_time_share_the_clock_of_the_machine() -> None:
    left, right = lanes_of({0: trace_of(STEP, start_s=5.0), 1: trace_of(STEP, rank=1, start_s=5.1)}, "time")
    assert left.periods[0].begin == 0.0
    assert right.periods[0].begin == pytest.approx(100.0)


def test_bars_that_are_open_at_an_end_reach_the_edge() -> None:
    (lane,) = lanes_of({0: trace_of("f R:root U:layers.0")}, "order")
    before, after = lane.periods
    assert (before.block, before.begin, before.open_left) == ("root", 0.0, True)
    assert (after.block, after.end, after.open_right) == ("layers.0", lane.end, True)


def test_a_collective_of_no_block_gets_a_row_of_its_own() -> None:
    (lane,) = lanes_of({0: trace_of(STEP + " A:ddp")}, "order")
    assert lane.rows[-1] == NO_BLOCK
    assert lane.marks[-1].kind == "all_reduce"


# The picture ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["order", "time"])
def test_every_bar_is_in_the_table_and_in_the_drawing(by: Literal["order", "time"]) -> None:
    picture = timeline({rank: trace_of(STEP, rank) for rank in range(4)}, by=by)
    assert len(picture.rows) == 4 * 5
    assert picture.rows[0][:3] == ("rank 0", "root", "forward")
    assert {row[6] for row in picture.rows} == {"100", "1,000"}
    styles = [node.getAttribute("style") for node in xml.dom.minidom.parseString(picture.svg).getElementsByTagName("path")]
    for rank in range(4):
        # two forwards and two backwards of blocks, in the rank's colour
        assert sum(f"fill: {rank_style(rank).color.lower()}" in style for style in styles) == 4
    assert picture.png.startswith(b"\x89PNG")


LONG = "f U:root G:root F:layers.0 F:layers.1 F:root b B:layers.1 B:layers.0 R:root"


@pytest.mark.parametrize(
    ("words", "written"),
    [
        pytest.param((STEP, STEP), 1, id="phases in the same places"),
        pytest.param((STEP, LONG), 2, id="phases elsewhere"),
        pytest.param((STEP, STEP.replace("b U:root", "U:root b"), STEP), 1, id="a step apart"),
        pytest.param((STEP, LONG, LONG), 2, id="elsewhere, twice the same"),
    ],
)
def test_a_lane_whose_phases_lie_elsewhere_has_their_names_above_it(words: tuple[str, ...], written: int) -> None:
    picture = timeline({f"lane {number}": trace_of(step) for number, step in enumerate(words)})
    assert picture.svg.count("<!-- backward -->") == written
    assert picture.svg.count("<!-- forward -->") == written


def test_the_names_of_phases_that_are_too_short_stand_in_one_line() -> None:
    picture = timeline({"long": trace_of(STEP), "short": trace_of("f U:root b R:root")})
    assert picture.svg.count("<!-- forward -->") == picture.svg.count("<!-- backward -->") == 1
    assert picture.svg.count("<!-- forward, backward -->") == 1


def test_the_alt_text_says_what_the_picture_shows() -> None:
    alt = timeline({0: trace_of(STEP), 1: trace_of(STEP, 1)}).alt
    assert "Timeline of 3 blocks in 2 lanes: rank 0, rank 1." in alt
    assert "Each lane: 5 all-gather, 3 reduce-scatter, at most 3 of 3 blocks whole at once, peak 2,100 bytes." in alt
    alt = timeline({"kept": trace_of(STEP.replace("R:layers.0", "")), "freed": trace_of(STEP)}).alt
    assert "kept: " in alt
    assert "freed: " in alt


def test_a_trace_without_any_event_can_be_drawn() -> None:
    picture = timeline({0: Trace(0, 1, BLOCKS, ())})
    assert "no collectives, at most 0 of 3 blocks whole at once, nothing is gathered." in picture.alt
    assert picture.rows


def test_more_lanes_than_can_be_read_are_refused() -> None:
    with pytest.raises(ValueError, match="9 lanes with 27 rows cannot be read"):
        timeline({rank: trace_of(STEP, rank) for rank in range(MAX_LANES + 1)})
    with pytest.raises(ValueError, match="0 lanes"):
        timeline({})


def test_the_picture_shows_itself_in_a_notebook() -> None:
    data, metadata = timeline({0: trace_of(STEP)})._repr_mimebundle_()
    assert "<figure" in data["text/html"]
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"].startswith("Timeline")


def test_drawing_a_trace_imports_no_torch() -> None:
    code = (
        "import sys; from labkit.notebook.pictures.timelines import timeline; "
        "from labkit.spmd.trace.events import Trace, TracedBlock; "
        "timeline({0: Trace(0, 1, (TracedBlock('root', 1, 1),), ())}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

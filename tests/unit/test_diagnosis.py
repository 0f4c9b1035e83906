"""The verdict on a run that waits names the cause and not its victims, and calls it a hang only if it cannot end by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from labkit.controller.hang.diagnosis import Diagnosis
from labkit.controller.hang.verdict import judge
from labkit.wire.messages import RankReport, RecordedCollective

PAIRS = {"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}


def collective(
    sequence: int, name: str = "all_reduce", group: str = "0", *sizes: tuple[int, ...], done: bool = False
) -> RecordedCollective:
    return RecordedCollective(sequence, name, group, sizes or ((4,),), ("Float",), done, "gloo")


def waits(
    line: int, sequence: int, name: str = "all_reduce", group: str = "0", *sizes: tuple[int, ...], calls: str = ""
) -> RankReport:
    """A rank that waits in a collective; ``calls`` is the function of torch.distributed, if its name differs."""
    mine = collective(sequence, name, group, *sizes)
    return replace(
        computes(line, cpu_s=0.0),
        innermost=f"c10d.py:1 {name}",
        in_collective=True,
        waits_in=calls or name,
        collectives=(collective(1, done=True), mine),
    )


def computes(line: int, cpu_s: float = 1.0, *past: RecordedCollective) -> RankReport:
    return RankReport(
        1,
        busy_s=5.0,
        where=f"Cell In[7], line {line}",
        code=f"code of line {line}",
        innermost=f"cell:{line} <module>",
        cpu_s=cpu_s,
        collectives=(collective(1, done=True), *past),
        groups=PAIRS,
    )


def idle(*past: RecordedCollective) -> RankReport:
    return RankReport(None, collectives=(collective(1, done=True), *past), groups=PAIRS)


def judged(
    now: Mapping[int, RankReport],
    *,
    finished: tuple[int, ...] = (),
    failed: tuple[int, ...] = (),
    dead: tuple[int, ...] = (),
    ranks: tuple[int, ...] | None = None,
    world_size: int = 0,
) -> Diagnosis:
    """Two looks, a second apart; in between, waiting ranks have used no CPU, and computing ranks a whole second."""
    all_ranks = range(world_size or max({*now, *finished, *failed, *dead}) + 1)
    before = {rank: replace(report, cpu_s=0.0) for rank, report in now.items()}
    return judge(all_ranks if ranks is None else ranks, all_ranks, finished, failed, dead, before, now, 1.0)


# ---- on a GPU ---------------------------------------------------------------------------------------------------------


def queued(sequence: int, line: int) -> RecordedCollective:
    return replace(collective(sequence), backend="nccl", where=f"Cell In[7], line {line}", code=f"code of line {line}")


@pytest.mark.parametrize(
    "report",
    [
        RankReport(1, 5.0, innermost="cuda:1 synchronize", in_collective=True, waits_in="synchronize", groups=PAIRS),
        replace(computes(9, cpu_s=0.0), innermost="cell:9 <module>"),
        replace(computes(9), in_collective=True, waits_in="synchronize"),
    ],
    ids=["behind its last line", "in a later line that looks at a result", "in a later synchronize()"],
)
def test_rank_that_has_queued_more_waits_in_the_first_collective_of_its_queue_and_at_that_line(report: RankReport) -> None:
    report = replace(report, collectives=(collective(4, done=True), queued(5, 3), queued(6, 4), queued(7, 8)))
    found = judged({0: report, 1: idle()}, finished=(1,))
    assert found.verdict == "rank 1 finished the cell; rank 0 waits in all_reduce #5 at Cell In[7], line 3 for it."
    assert "Cell In[7], line 3  all_reduce #5, shape [4]  code of line 3" in str(found)


# ---- somebody is missing ---------------------------------------------------------------------------------------------


def test_case_8_rank_that_finished_without_the_collective_is_named() -> None:
    found = judged({0: waits(5, 14), 1: waits(5, 14), 2: idle(), 3: waits(5, 14)}, finished=(2,))
    assert (found.kind, found.hangs) == ("missing rank", True)
    assert found.verdict == "rank 2 finished the cell; ranks 0-1, 3 wait in all_reduce #14 at Cell In[7], line 5 for it."


def test_several_missing_ranks_are_named_together() -> None:
    found = judged({0: waits(5, 2), 1: idle(), 2: idle()}, finished=(1, 2))
    assert found.verdict == "ranks 1-2 finished the cell; rank 0 waits in all_reduce #2 at Cell In[7], line 5 for them."


def test_rank_that_failed_is_missing() -> None:
    found = judged({0: waits(5, 2), 1: idle()}, failed=(1,))
    assert (found.kind, found.hangs) == ("missing rank", True)
    assert found.verdict.startswith("rank 1 failed; rank 0 waits in")


def test_rank_outside_the_run_is_missing_from_a_collective_of_all() -> None:
    found = judged({0: waits(1, 2, "barrier"), 1: idle()}, ranks=(0,), world_size=2)
    assert (found.kind, found.hangs) == ("missing rank", True)
    assert found.verdict == "rank 1 is not part of this run; rank 0 waits in barrier #2 at Cell In[7], line 1 for it."


def test_rank_outside_the_group_is_not_missed() -> None:
    found = judged({0: waits(1, 1, "barrier", "1"), 1: computes(9), 2: idle(), 3: idle()}, finished=(2, 3))
    assert found.kind == "straggler"
    assert found.verdict.startswith("rank 1 is still computing at Cell In[7], line 9; rank 0 waits in barrier #1")


def test_sender_that_went_on_is_not_missed() -> None:
    sent = collective(2, "broadcast", done=True)
    found = judged({0: idle(sent), 1: waits(3, 2, "broadcast"), 2: computes(8)}, finished=(0,))
    assert found.kind == "straggler"
    assert found.verdict.startswith("rank 2 is still computing at Cell In[7], line 8; rank 1 waits")


def test_record_of_another_backend_does_not_count() -> None:
    on_gloo = collective(2, "broadcast", done=True)
    on_nccl = replace(waits(3, 2), collectives=(replace(collective(2), backend="nccl"),))
    found = judged({0: on_nccl, 1: idle(on_gloo)}, finished=(1,))
    assert found.kind == "missing rank"


def test_message_that_nobody_sends_is_missed_from_all_others() -> None:
    receiver = replace(waits(4, 0, "recv"), collectives=(collective(1, done=True),))
    found = judged({0: idle(), 1: receiver}, finished=(0,))
    assert (found.kind, found.hangs) == ("missing rank", True)
    assert found.verdict == "rank 0 finished the cell; rank 1 waits in recv at Cell In[7], line 4 for it."


# ---- calls that do not match -----------------------------------------------------------------------------------------


def test_case_9_different_collectives_are_named_with_their_lines() -> None:
    found = judged({0: waits(3, 2, "all_reduce"), 1: waits(5, 2, "broadcast")})
    assert (found.kind, found.hangs) == ("different collectives", True)
    assert found.verdict == (
        "The ranks called different collectives: rank 0 in all_reduce #2 at Cell In[7], line 3; "
        "rank 1 in broadcast #2 at Cell In[7], line 5."
    )


def test_one_call_under_two_spellings_is_the_same_collective() -> None:
    left = waits(3, 2, "_all_gather_base", calls="all_gather_into_tensor")
    right = waits(3, 2, "all_gather", calls="all_gather_single")
    assert judged({0: left, 1: right}).kind == "same collective"


def test_different_collective_of_a_rank_that_went_on_is_named() -> None:
    found = judged({0: idle(collective(2, "broadcast", done=True)), 1: waits(3, 2)}, finished=(0,))
    assert (found.kind, found.hangs) == ("different collectives", True)
    assert found.verdict.endswith("rank 1 in all_reduce #2 at Cell In[7], line 3; rank 0 called broadcast #2 and went on.")


def test_case_9_different_shapes_are_named_with_their_ranks() -> None:
    found = judged({0: waits(3, 2, "all_reduce", "0", (4,)), 1: waits(3, 2, "all_reduce", "0", (5,)), 2: waits(3, 2)})
    assert (found.kind, found.hangs) == ("different shapes", True)
    assert found.verdict == "The ranks called all_reduce #2 with different shapes: ranks 0, 2 sent [4], rank 1 sent [5]."


def test_different_shape_of_a_rank_that_went_on_is_named() -> None:
    past = collective(2, "all_reduce", "0", (3,), done=True)
    found = judged({0: idle(past), 1: waits(3, 2, "all_reduce", "0", (4,))}, finished=(0,))
    assert found.kind == "different shapes"
    assert found.verdict == "The ranks called all_reduce #2 with different shapes: rank 0 sent [3] and went on, rank 1 sent [4]."


def test_different_shape_of_a_rank_that_computes_again_is_named() -> None:
    past = collective(2, "all_reduce", "0", (3,), done=True)
    found = judged({0: computes(9, 1.0, past), 1: waits(3, 2, "all_reduce", "0", (4,))})
    assert (found.kind, found.hangs) == ("different shapes", True)


def test_uneven_all_to_all_is_no_mismatch() -> None:
    found = judged({0: waits(3, 2, "all_to_all_single", "0", (3,)), 1: waits(3, 2, "all_to_all_single", "0", (5,))})
    assert (found.kind, found.hangs) == ("same collective", False)


def test_ranks_that_stay_at_different_numbers_are_named_with_them() -> None:
    found = judged({0: waits(3, 2), 1: waits(5, 3)})
    assert (found.kind, found.hangs) == ("different numbers", True)
    assert found.verdict == (
        "The ranks are at different collectives of one group: rank 0 in all_reduce #2 at Cell In[7], line 3; "
        "rank 1 in all_reduce #3 at Cell In[7], line 5."
    )


def test_ranks_that_name_different_sources_are_named_with_them() -> None:
    found = judged({rank: replace(waits(3, 2, "broadcast"), partner=rank) for rank in (0, 1)})
    assert (found.kind, found.hangs) == ("different sources", True)
    assert "rank 0 in broadcast #2 with source 0 at Cell In[7], line 3; rank 1 in broadcast #2 with source 1" in found.verdict


def test_rank_that_stays_in_a_call_that_the_others_have_left_is_named_with_its_source() -> None:
    left = replace(waits(3, 2, "broadcast"), partner=1)
    found = judged({0: idle(collective(2, "broadcast", done=True)), 1: left}, finished=(0,))
    assert (found.kind, found.hangs) == ("left behind", True)
    assert found.verdict == (
        "rank 1 in broadcast #2 with source 1 at Cell In[7], line 3 is left behind; rank 0 made the same call and went on. "
        "Every rank has to name the same source."
    )


def test_shapes_of_equally_many_elements_are_no_mismatch() -> None:
    found = judged({0: waits(3, 2, "all_reduce", "0", (2, 3)), 1: waits(3, 2, "all_reduce", "0", (6,))})
    assert (found.kind, found.hangs) == ("same collective", False)


def test_ranks_that_wait_for_each_other_in_two_groups_are_in_different_groups() -> None:
    found = judged({0: waits(3, 1, "barrier", "1"), 1: waits(4, 2, "barrier", "0")}, world_size=2)
    assert (found.kind, found.hangs) == ("different groups", True)
    assert (
        "rank 0 in barrier #1 of a group of ranks 0-1 at Cell In[7], line 3; rank 1 in barrier #2 of the default group at"
        in found.verdict
    )


# ---- what proves nothing ---------------------------------------------------------------------------------------------

ONCE = {
    "one rank ahead": {0: waits(3, 2), 1: waits(3, 3)},
    "two groups": {0: waits(3, 1, "barrier", "1"), 1: waits(4, 2, "barrier", "0")},
    "a message": {0: replace(waits(4, 0, "recv"), collectives=(), partner=1), 1: replace(waits(3, 0, "send"), collectives=())},
    "a rank between two calls": {0: waits(3, 2), 1: computes(4)},
}


@pytest.mark.parametrize("moment", ONCE)
def test_p1_one_look_says_where_the_ranks_are_and_blames_none(moment: str) -> None:
    for before in ({}, {rank: replace(report, begun={"0": 1}) for rank, report in ONCE[moment].items()}):
        found = judge((0, 1), (0, 1), (), (), (), before, ONCE[moment], 1.0)
        assert (found.kind, found.hangs) == ("running", False)
        assert "rank 0 in " in found.verdict


def test_p1_ranks_of_two_groups_are_not_all_in_the_collective_of_one() -> None:
    pair = {rank: waits(5, 4, "all_reduce", "1") for rank in (0, 1)}
    for other in (waits(6, 3, "all_reduce", "2"), computes(6)):
        found = judge(range(3), range(3), (), (), (), {}, {**pair, 2: other}, 0.0)
        assert (found.kind, found.hangs) == ("running", False)
        assert "ranks 0-1 in all_reduce #4 at Cell In[7], line 5; rank 2 " in found.verdict


def test_p1_two_looks_at_one_moment_prove_nothing() -> None:
    reports = ONCE["one rank ahead"]
    assert judge((0, 1), (0, 1), (), (), (), reports, reports, 0.1).kind == "running"


def test_p1_receiver_that_computes_is_not_left_behind_by_a_sender_that_went_on() -> None:
    now = {0: idle(collective(2, "broadcast", done=True)), 1: replace(waits(3, 2, "broadcast"), cpu_s=1.0)}
    before = {rank: replace(report, cpu_s=0.0) for rank, report in now.items()}
    assert judge((0, 1), (0, 1), (0,), (), (), before, now, 1.0).kind == "running"


def test_p1_rank_that_finished_far_ahead_is_not_missed() -> None:
    ahead = tuple(collective(number, "broadcast", done=True) for number in range(980, 1001))
    found = judge((0, 1), (0, 1), (0,), (), (), {}, {0: idle(*ahead), 1: waits(3, 5, "broadcast")}, 0.0)
    assert (found.kind, found.hangs) == ("running", False)


def test_p1_rank_that_finished_without_a_call_of_the_record_is_missed_at_once() -> None:
    found = judge((0, 1), (0, 1), (1,), (), (), {}, {0: waits(5, 2), 1: idle()}, 0.0)
    assert (found.kind, found.hangs) == ("missing rank", True)


def test_p18_group_of_the_same_name_and_other_ranks_is_not_compared() -> None:
    other = replace(idle(collective(2, "broadcast", done=True)), groups={"0": (1,)})
    found = judge((0, 1), (0, 1), (1,), (), (), {}, {0: waits(5, 2), 1: other}, 0.0)
    assert found.verdict == "rank 1 finished the cell; rank 0 waits in all_reduce #2 at Cell In[7], line 5 for it."


def test_victims_in_different_calls_are_each_named_with_theirs() -> None:
    found = judged({0: waits(3, 1, "all_gather", "1"), 1: idle(), 2: waits(5, 2)}, finished=(1,))
    assert found.verdict == (
        "rank 1 finished the cell; rank 0 waits in all_gather #1 at Cell In[7], line 3 "
        "and rank 2 waits in all_reduce #2 at Cell In[7], line 5 for it."
    )


# ---- waiting that may end --------------------------------------------------------------------------------------------


def test_rank_that_computes_is_a_straggler_and_no_hang() -> None:
    found = judged({0: waits(5, 2), 1: computes(9)})
    assert (found.kind, found.hangs) == ("straggler", False)
    assert found.verdict == (
        "rank 1 is still computing at Cell In[7], line 9; rank 0 waits in all_reduce #2 at Cell In[7], line 5 for it."
    )


def test_rank_that_sleeps_is_a_straggler_that_does_not_compute() -> None:
    found = judged({0: waits(5, 2), 1: computes(9, cpu_s=0.0)})
    assert (found.kind, found.hangs) == ("straggler", False)
    assert found.verdict.startswith("rank 1 is still busy at Cell In[7], line 9;")


def test_rank_that_does_not_answer_is_a_straggler() -> None:
    found = judged({0: waits(5, 2)}, world_size=2)
    assert (found.kind, found.hangs) == ("straggler", False)
    assert found.verdict.startswith("rank 1 is still busy at an unknown line;")


def test_straggler_of_a_mesh_is_named_though_its_victims_wait_in_different_groups() -> None:
    found = judged({0: computes(2), 1: waits(5, 1, "all_reduce", "4"), 2: waits(5, 1, "all_reduce", "2"), 3: computes(9)})
    assert (found.kind, found.hangs) == ("straggler", False)
    assert found.verdict.startswith("rank 3 is still computing at Cell In[7], line 9; ranks 1-2 wait")


def test_message_that_a_busy_rank_will_send_is_no_mismatch() -> None:
    receiver = replace(waits(4, 0, "recv"), collectives=(collective(1, done=True),))
    found = judged({0: waits(5, 2, "barrier"), 1: receiver, 2: computes(9)})
    assert (found.kind, found.hangs) == ("straggler", False)


def test_all_ranks_in_one_collective_is_no_hang() -> None:
    found = judged({0: waits(5, 2), 1: waits(5, 2)})
    assert (found.kind, found.hangs) == ("same collective", False)
    assert found.verdict == "ranks 0-1 are all in all_reduce #2 at Cell In[7], line 5."


def test_missing_rank_is_found_behind_a_straggler_of_another_group() -> None:
    found = judged({0: waits(5, 1, "all_reduce", "1"), 1: idle(), 2: waits(5, 1, "all_reduce", "2"), 3: computes(9)}, finished=(1,))
    assert (found.kind, found.hangs) == ("missing rank", True)
    assert found.verdict == "rank 1 finished the cell; rank 0 waits in all_reduce #1 at Cell In[7], line 5 for it."


# ---- nobody waits ----------------------------------------------------------------------------------------------------


def test_dead_rank_is_the_cause_for_those_that_wait() -> None:
    found = judged({0: waits(5, 2)}, dead=(1,))
    assert (found.kind, found.hangs) == ("dead rank", True)
    assert found.verdict == "rank 1 died; rank 0 waits in all_reduce #2 at Cell In[7], line 5 for it."


def test_ranks_that_compute_are_working() -> None:
    found = judged({0: computes(5), 1: computes(6)})
    assert (found.kind, found.verdict) == ("working", "ranks 0-1 are computing at Cell In[7], line 5 and Cell In[7], line 6.")
    assert not found.hangs


def test_ranks_that_sleep_are_in_native_code() -> None:
    found = judged({0: computes(5, cpu_s=0.0), 1: computes(5, cpu_s=0.0)})
    assert (found.kind, found.hangs) == ("native code", False)
    assert found.verdict == "ranks 0-1 are at Cell In[7], line 5, outside collectives, and sleep or wait there."


def test_one_look_does_not_tell_sleep_from_work() -> None:
    report = computes(5, cpu_s=0.0)
    assert judge((0,), (0,), (), (), (), {}, {0: report}, 0.0).kind == "working"


def test_rank_that_does_not_answer_is_named() -> None:
    found = judged({0: idle()}, finished=(0,), world_size=2)
    assert (found.kind, found.hangs) == ("no answer", False)
    assert found.verdict == "rank 1 did not answer: native code there holds Python's lock, or the process is stopped."


def test_no_run_is_idle() -> None:
    found = judged({0: idle(), 1: idle()}, ranks=())
    assert (found.kind, found.hangs) == ("idle", False)


# ---- collectives of an accelerator -----------------------------------------------------------------------------------


def test_synchronization_behind_a_collective_is_named_as_that_collective() -> None:
    spinning = replace(waits(5, 7, "all_reduce", calls="synchronize"), cpu_s=1.0)
    found = judged({0: spinning, 1: idle()}, finished=(1,))
    assert found.verdict == "rank 1 finished the cell; rank 0 waits in all_reduce #7 at Cell In[7], line 5 for it."


def test_collective_under_way_while_the_line_goes_on_is_no_wait() -> None:
    overlapping = computes(5, 1.0, collective(2))
    before = replace(overlapping, innermost="cell:4 <module>", cpu_s=0.0)
    assert judge((0,), (0,), (), (), (), {0: before}, {0: overlapping}, 1.0).kind == "working"


# ---- how it looks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def table() -> Diagnosis:
    report = replace(waits(5, 14), code="dist.all_reduce(x) if a < b else 0")
    return judged({0: report, 1: idle(), 3: report}, finished=(1,), dead=(2,), world_size=4)


def test_text_has_one_line_for_each_rank_below_the_verdict(table: Diagnosis) -> None:
    lines = str(table).splitlines()
    assert lines[0] == table.verdict
    assert lines[1].split() == ["rank", "state", "where", "waits", "in", "code"]
    assert [line.split()[:2] for line in lines[2:]] == [["0", "waiting"], ["1", "finished"], ["2", "dead"], ["3", "waiting"]]
    assert "Cell In[7], line 5  all_reduce #14, shape [4]  dist.all_reduce(x) if a < b else 0" in lines[2]


def test_html_has_one_row_for_each_rank_and_escapes_code(table: Diagnosis) -> None:
    html = table._repr_html_()
    assert html.count("<tr>") == 5
    assert "if a &lt; b else 0" in html
    assert "all_reduce #14, shape [4]" in html

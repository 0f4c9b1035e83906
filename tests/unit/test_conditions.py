"""The conclusions that each rank draws from the conditions that ranks exchange after a run was cut off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.worker.groups.conditions import Condition, GroupCondition, StepCondition
from labkit.worker.groups.judgement import judge

WORLD = GroupCondition((0, 1), (7,))
STEP = StepCondition("optimizer (Adam, for model)", "Adam[4]", 3, under_way=False, shared=True, rates=(0.1,))
CALM = Condition(0, run_id=5, groups={"0": WORLD}, group_count=3, steps=(STEP,), random={"CPU": ("a", "a")})


def ranks(*changes: dict[str, object]) -> list[Condition]:
    """One condition per rank: the calm one, changed."""
    return [replace(CALM, rank=rank, **change) for rank, change in enumerate(changes)]  # type: ignore[arg-type]


def test_a_condition_survives_the_exchange() -> None:
    assert Condition.from_json(CALM.to_json()) == CALM


def test_nothing_is_done_where_nothing_happened() -> None:
    verdict = judge(ranks({}, {}))
    assert (verdict.renew, verdict.drop, verdict.broken, verdict.refusals, verdict.notes) == (False, (), {}, (), ())


@pytest.mark.parametrize(
    "change",
    [{"lost": True}, {"waiting": True}, {"groups": {"0": replace(WORLD, sequence=(8,))}}],
    ids=["aborted", "collective under way", "one collective ahead"],
)
def test_groups_are_renewed_when_one_rank_needs_it(change: dict[str, object]) -> None:
    assert judge(ranks({}, change)).renew


@pytest.mark.parametrize(
    ("first", "second", "drop"),
    [
        ({"touched": True}, {"cut": True}, ()),
        ({"touched": True, "in_flight": ("DDP a",)}, {}, ("DDP a",)),
        ({"touched": True, "in_flight": ("DDP a",)}, {"in_flight": ("FSDP2 b", "DDP a")}, ("DDP a", "FSDP2 b")),
        ({"touched": True, "in_flight": ("DDP a",), "run_id": 4}, {"cut": True}, ()),
        ({"touched": True, "in_flight": ("DDP a",), "well": True}, {"well": True}, ()),
    ],
    ids=["all complete", "on one rank", "two models", "touched by an earlier run", "ended well"],
)
def test_p6_only_models_that_were_cut_somewhere_are_dropped(
    first: dict[str, object], second: dict[str, object], drop: tuple[str, ...]
) -> None:
    assert judge(ranks(first, second)).drop == drop


@pytest.mark.parametrize(
    ("first", "second", "drop", "kept"),
    [("ab", "ab", (), True), ("ab", "", ("DDP a",), False), ("ab", "a", ("DDP a",), False), ("", "", (), False)],
)
def test_p6_gradients_are_kept_where_every_rank_has_the_same(first: str, second: str, drop: tuple[str, ...], kept: bool) -> None:
    has = [{"touched": True, "cut": True, "gradients": {"DDP a": ("model (DDP)", text)}} for text in (first, second)]
    verdict = judge(ranks(*has))
    assert (verdict.drop, verdict.in_flight) == (drop, False)
    told = "model (DDP): gradients are complete and kept. zero_grad() clears them; else the next backward adds to them."
    assert verdict.notes == ((told,) if kept else ())


def test_p7_steps_are_known_only_where_every_rank_completed_the_same_ones() -> None:
    assert judge(ranks({}, {})).steps_known
    for other in ((), (replace(STEP, completed=2),), (replace(STEP, under_way=True),)):
        assert not judge(ranks({}, {"steps": other})).steps_known
    assert not judge(ranks({"steps": ()}, {"steps": ()})).steps_known


def test_p7_parameters_that_ranks_changed_differently_are_named_with_their_model() -> None:
    def prints(kind: str, **texts: str) -> dict[str, object]:
        return {"prints": {f"{kind} over (0, 1)": (f"model ({kind})", texts)}}

    [note] = judge(ranks(prints("DDP", weight="5", bias="7"), prints("DDP", weight="5", bias="8"))).notes
    assert note.startswith("1 of 2 parameters of model (DDP) differ between rank 0 and rank 1: bias.")
    [note] = judge(ranks(prints("FSDP2", weight="5 changes"), prints("FSDP2", weight="4 changes"))).notes
    assert note.startswith("1 of 1 parameters of model (FSDP2) may differ between")
    assert judge(ranks(prints("DDP", weight="5"), prints("DDP", weight="5"))).notes == ()


def test_c2_groups_out_of_step_after_a_good_end_are_renewed_and_nothing_else_is_said() -> None:
    ahead = {"well": True, "waiting": True, "groups": {"0": replace(WORLD, sequence=(8,))}, "random": {"CPU": ("a", "b")}}
    verdict = judge(ranks({"well": True, "steps": (replace(STEP, completed=2),)}, ahead))
    assert (verdict.renew, verdict.drop, verdict.restart_reducers, verdict.refusals, verdict.notes) == (True, (), False, (), ())


def test_a_rank_without_a_default_group_cannot_be_mended() -> None:
    with pytest.raises(RuntimeError, match="destroyed on rank 1"):
        judge(ranks({"lost": True}, {"homeless": True, "groups": {}}))


def test_the_next_group_gets_a_number_that_no_rank_has_used() -> None:
    assert judge(ranks({"group_count": 4}, {"group_count": 9})).group_count == 9


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_a_group_that_a_member_does_not_know_is_broken() -> None:
    verdict = judge(ranks({"groups": {"0": WORLD, "4": GroupCondition((0, 1), (0,))}}, {}))
    assert list(verdict.broken) == ["4"]
    assert "exists only on rank 0" in verdict.broken["4"]
    assert verdict.broken["4"] in verdict.notes
    assert not verdict.renew


def test_a_group_of_some_ranks_is_whole_when_these_know_it() -> None:
    assert judge(ranks({"groups": {"0": WORLD, "4": GroupCondition((0,), (2,))}}, {})).broken == {}


def test_one_name_for_two_groups_breaks_both() -> None:
    pair, alone = GroupCondition((0, 1), (0,)), GroupCondition((1,), (0,))
    assert "4" in judge(ranks({"groups": {"0": WORLD, "4": pair}}, {"groups": {"0": WORLD, "4": alone}})).broken


def test_groups_of_one_rank_each_may_share_a_name() -> None:
    first, second = GroupCondition((0,), (1,)), GroupCondition((1,), (5,))
    verdict = judge(ranks({"groups": {"0": WORLD, "4": first}}, {"groups": {"0": WORLD, "4": second}}))
    assert (verdict.renew, verdict.broken) == (False, {})


def test_a_group_of_an_unknown_backend_is_named() -> None:
    group = GroupCondition((0, 1), (), obstacle="labkit does not know its backend 'ucc'")
    groups = {"0": WORLD, "4": group}
    verdict = judge(ranks({"groups": groups, "lost": True}, {"groups": groups}))
    assert "cannot be rebuilt: labkit does not know its backend 'ucc'" in verdict.broken["4"]


# ---- optimizers ------------------------------------------------------------------------------------------------------


def test_half_a_step_is_refused_on_every_rank_of_the_run() -> None:
    half = replace(STEP, under_way=True)
    verdict = judge([*ranks({}, {"steps": (half,)}), replace(CALM, rank=2, run_id=4, groups={})])
    [refusal] = verdict.refusals
    assert refusal.ranks == (0, 1)
    assert (refusal.position, refusal.signature) == (0, "Adam[4]")
    assert "Rank 1 stopped inside step() of optimizer (Adam, for model)" in verdict.notes[0]
    assert "is refused" in refusal.reason


def test_different_numbers_of_steps_are_refused_where_the_parameters_are_shared() -> None:
    behind = replace(STEP, completed=2)
    assert "3 on rank 0, 2 on rank 1" in judge(ranks({}, {"steps": (behind,)})).notes[0]
    assert "3 on rank 0, 0 on rank 1" in judge(ranks({}, {"steps": ()})).notes[0]
    local, local_behind = replace(STEP, shared=False), replace(behind, shared=False)
    assert judge(ranks({"steps": (local,)}, {"steps": (local_behind,)})).refusals == ()


def test_half_a_local_step_is_refused_on_its_own_rank_only() -> None:
    local = replace(STEP, shared=False)
    [refusal] = judge(ranks({"steps": (local,)}, {"steps": (replace(local, under_way=True),)})).refusals
    assert refusal.ranks == (1,)


def test_ranks_that_run_different_programs_are_not_compared() -> None:
    other = replace(STEP, signature="SGD[2]", completed=9)
    assert judge(ranks({}, {"steps": (other,)})).refusals == ()
    [refusal] = judge(ranks({}, {"steps": (replace(other, under_way=True),)})).refusals
    assert (refusal.ranks, refusal.signature) == ((1,), "SGD[2]")


def test_the_second_optimizer_is_told_apart_from_the_first() -> None:
    verdict = judge(ranks({"steps": (STEP, STEP)}, {"steps": (STEP, replace(STEP, completed=2))}))
    assert [refusal.position for refusal in verdict.refusals] == [1]


def test_learning_rates_that_differ_are_named() -> None:
    [note] = judge(ranks({}, {"steps": (replace(STEP, rates=(0.2,)),)})).notes
    assert "rank 0: 0.1; rank 1: 0.2" in note


# ---- random states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (("a", "a"), ("a", "b"), "Rank 1 drew random numbers and the others did not"),
        (("a", "c"), ("a", "b"), "Ranks 0-1 drew random numbers in different numbers"),
        (("a", "b"), ("a", "b"), ""),
        (("a", "a"), ("x", "x"), ""),
        (("a", "b"), ("x", "y"), ""),
    ],
    ids=["one drew", "both drew", "alike", "different before", "different throughout"],
)
def test_random_states_are_named_when_they_came_to_differ(first: tuple[str, str], second: tuple[str, str], says: str) -> None:
    notes = judge(ranks({"cut": True, "random": {"CPU": first}}, {"random": {"CPU": second}})).notes
    assert [note.startswith(says) for note in notes] == ([True] if says else [])


def test_switched_off_gradient_synchronization_is_named_when_ranks_differ() -> None:
    [note] = judge(ranks({"cut": True, "unsynced": 3}, {})).notes
    assert "switched off on rank 0 only" in note
    assert judge(ranks({"cut": True, "unsynced": 3}, {"unsynced": 3})).notes == ()


def test_steps_that_changed_nothing_are_told_and_are_no_divergence() -> None:
    verdict = judge(ranks({"lost": True, "steps": (replace(STEP, skipped=2),)}, {"cut": True}))
    (note,) = verdict.notes
    assert "have changed nothing: 2 on rank 0." in note
    assert not verdict.refusals

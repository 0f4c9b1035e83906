"""Output of ranks appears line by line with the rank in front: nothing lost, nothing changed, nothing twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.controller.output import heading, labelled
from labkit.controller.run import rank_output as module
from labkit.controller.run.rank_output import LIMIT_CHARS, RankOutput
from labkit.wire.messages import Display, Stream, StreamName


class Cell:
    """The output area of a notebook cell: text is appended, displays with an id are updated in place."""

    def __init__(self) -> None:
        self.items: list[tuple[str, Any]] = []
        self._places: dict[str, int] = {}

    def text(self, name: StreamName, text: str, rank: int | None = None) -> None:
        self.items.append((name, labelled(text, rank)))

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, rank: int | None = None
    ) -> None:
        if update:
            assert display_id is not None
            self.items[self._places[display_id]] = ("display", data)
            return
        if rank is not None:
            self.items.append(("display", heading((rank,))))
        if display_id is not None:
            self._places[display_id] = len(self.items)
        self.items.append(("display", data))

    def clear(self, wait: bool, rank: int | None = None) -> None:
        self.items.append(("clear", wait))

    def stream(self, name: str) -> str:
        return "".join(text for kind, text in self.items if kind == name)

    def displays(self) -> list[str]:
        return [data.get("text/plain", "") for kind, data in self.items if kind == "display"]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test controls: now[0] is the time."""
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    return clock


def out(text: str) -> list[Stream | Display]:
    return [Stream("stdout", text)]


def shown(text: str, **options: Any) -> str:
    cell = Cell()
    output = RankOutput(cell, 1, **options)
    output.feed(0, out(text))
    output.finish()
    return cell.stream("stdout")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n", "[rank 0] one\n[rank 0] two\n"),
        ("no newline", "[rank 0] no newline\n"),
        ("a\n\n\nb\n", "[rank 0] a\n[rank 0] \n[rank 0] \n[rank 0] b\n"),
        ("\n", "[rank 0] \n"),
        ("    four\n\ttab\n  \n", "[rank 0]     four\n[rank 0] \ttab\n[rank 0]   \n"),
        ("trailing  \n", "[rank 0] trailing  \n"),
        ("dos\r\nlines\r\n", "[rank 0] dos\n[rank 0] lines\n"),
        ("10%\r20%\r100%\n", "[rank 0] 100%\n"),
        ("longer\rxy\n", "[rank 0] xynger\n"),
        ("bar\r", "[rank 0] bar\n"),
        ("form\x0cfeed\x0bvertical\x85next\u2028line\x1c\n", "[rank 0] form\x0cfeed\x0bvertical\x85next\u2028line\x1c\n"),
        ("\x1b[31mred\x1b[0m\n", "[rank 0] \x1b[31mred\x1b[0m\n"),
        ("[rank 3] Result Failed Ready Bye None\n", "[rank 0] [rank 3] Result Failed Ready Bye None\n"),
        ("\U0001f600 é 漢\n", "[rank 0] \U0001f600 é 漢\n"),
        ("", ""),
    ],
)
def test_line_is_shown_as_it_was_written_with_the_rank_in_front(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_pool_of_one_rank_shows_text_as_it_is() -> None:
    assert shown("a\n\nb", label=False) == "a\n\nb\n"


def test_line_that_arrives_in_pieces_is_one_line() -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    for piece in ("he", "llo\nwor", "", "ld", "\n"):
        output.feed(0, out(piece))
    output.finish()
    assert cell.stream("stdout") == "[rank 0] hello\n[rank 0] world\n"


def test_streams_stay_apart_and_in_order() -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    output.feed(2, [Stream("stdout", "a\n"), Stream("stderr", "b\n"), Stream("stdout", "c\n")])
    output.finish()
    assert cell.items == [("stdout", "[rank 2] a\n"), ("stderr", "[rank 2] b\n"), ("stdout", "[rank 2] c\n")]


def test_unfinished_lines_of_two_ranks_and_streams_do_not_mix() -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    for rank, name, text in (
        (0, "stdout", "a"),
        (1, "stdout", "b"),
        (0, "stderr", "c"),
        (0, "stdout", "A\n"),
        (1, "stdout", "B\n"),
    ):
        output.feed(rank, [Stream(name, text)])  # type: ignore[arg-type]
    output.finish()
    assert sorted(cell.stream("stdout").splitlines()) == ["[rank 0] aA", "[rank 1] bB"]
    assert cell.stream("stderr") == "[rank 0] c\n"


def test_output_of_one_moment_is_shown_in_rank_order(now: list[float]) -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    for rank in (3, 1, 0, 2):
        output.feed(rank, out(f"from {rank}\n"))
    assert cell.items == []
    now[0] += 2 * module.GATHER_S
    output.tick()
    assert cell.stream("stdout").splitlines() == [f"[rank {rank}] from {rank}" for rank in range(4)]


def test_output_appears_while_the_run_goes_on(now: list[float]) -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    output.feed(0, out("early\n"))
    now[0] += 2 * module.GATHER_S
    output.tick()
    assert cell.stream("stdout") == "[rank 0] early\n"


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["stdout", "stderr"]), st.text(st.sampled_from("ab \t\r\n"), max_size=6)),
        max_size=30,
    )
)
def test_however_text_is_cut_into_pieces_each_rank_shows_the_same(pieces: list[tuple[int, StreamName, str]]) -> None:
    cut, whole = Cell(), Cell()
    output = RankOutput(cut, 1)
    for rank, name, text in pieces:
        output.feed(rank, [Stream(name, text)])
        output.tick()
    output.finish()
    together = RankOutput(whole, 1)
    for rank in range(3):
        for name in ("stdout", "stderr"):
            together.feed(rank, [Stream(name, "".join(text for r, n, text in pieces if (r, n) == (rank, name)))])  # type: ignore[arg-type]
    together.finish()
    for name in ("stdout", "stderr"):
        assert sorted(cut.stream(name).splitlines()) == sorted(whole.stream(name).splitlines())


def test_unfinished_line_is_shown_live_in_place_and_kept_as_text(now: list[float]) -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    for percent in range(0, 101, 20):
        output.feed(0, out(f"\r{percent}%"))
        output.feed(1, out(f"\r{percent // 2}%"))
        now[0] += 2 * module.LIVE_AFTER_S
        output.tick()
    assert cell.displays() == ["[rank 0] 100%\n[rank 1] 50%"]
    output.finish()
    assert cell.displays() == [""]
    assert cell.stream("stdout") == "[rank 0] 100%\n[rank 1] 50%\n"


def test_line_that_is_finished_soon_opens_no_live_display(now: list[float]) -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    output.feed(0, out("half"))
    now[0] += 2 * module.GATHER_S
    output.tick()
    output.feed(0, out(" and half\n"))
    now[0] += 2 * module.GATHER_S
    output.tick()
    output.finish()
    assert cell.displays() == []


def test_long_progress_bar_keeps_its_latest_state_and_costs_no_memory(now: list[float]) -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    step = "x" * 100
    for number in range(2 * LIMIT_CHARS // 100):
        output.feed(0, out(f"\r{number:9d} {step}"))
        now[0] += 2 * module.LIVE_AFTER_S
        output.tick()
    output.finish()
    assert cell.stream("stdout") == f"[rank 0] {number:9d} {step}\n"
    assert cell.stream("stderr") == ""


def flood(lines: int, size: int = 1000) -> str:
    return "".join(f"{number:08}{'y' * (size - 9)}\n" for number in range(lines))


@pytest.mark.parametrize("size", [1000, 999, 17_001])
def test_p15_flood_keeps_head_and_tail_says_what_lies_between_and_leaves_the_other_ranks_alone(size: int) -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    text = flood(3 * LIMIT_CHARS // size, size)
    for begin in range(0, len(text), 64_000):
        output.feed(0, out(text[begin : begin + 64_000]))
    output.feed(1, out("here\n"))
    output.finish()
    shown = cell.stream("stdout").replace("[rank 1] here\n", "").replace("[rank 0] ", "")
    head, tail = text[: len(text) // 2], text[len(text) // 2 :]
    kept = [line for line in shown.splitlines() if line]
    assert text.startswith("\n".join(kept[:5]))
    assert text.endswith("\n".join(kept[-5:]) + "\n")
    assert LIMIT_CHARS - 2 * size <= len(shown) <= LIMIT_CHARS + 1
    assert head.startswith(shown[: LIMIT_CHARS // 2 - size])
    assert tail.endswith(shown[-LIMIT_CHARS // 2 + size :])
    told = cell.stream("stderr").replace("[rank 0] ", "").splitlines()
    assert told[0] == "... the end of the output follows when the run is over ..."
    left_out = int(told[1].split()[1].replace(",", ""))
    assert told[1] == f"... {left_out:,} of {len(text):,} characters of output are left out here ..."
    assert abs(left_out - (len(text) - len(shown))) <= 1  # a line that is cut ends all the same


def test_p15_output_within_the_limit_is_whole_although_its_end_comes_later() -> None:
    cell = Cell()
    output = RankOutput(cell, 1, label=False)
    text = flood(LIMIT_CHARS // 1000)
    output.feed(0, out(text))
    output.finish()
    assert cell.stream("stdout") == text
    assert "left out" not in cell.stream("stderr")


def test_p15_one_endless_line_keeps_its_begin_and_its_end() -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    for number in range(100):
        output.feed(0, out(f"<{number:02}>" + "z" * 64_000))
    output.feed(0, out("\nlast line\n"))
    output.finish()
    shown = cell.stream("stdout")
    assert shown.startswith("[rank 0] <00>zzz")
    assert "<99>" in shown
    assert shown.endswith("[rank 0] last line\n")
    assert "<40>" not in shown
    assert LIMIT_CHARS // 2 < shown.count("z") <= LIMIT_CHARS
    (told,) = [line for line in cell.stream("stderr").splitlines() if "left out" in line]
    assert f" of {100 * 64_004 + 11:,} characters of output are left out here" in told


def test_p15_display_that_clears_makes_room_again() -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    for _ in range(3):
        output.feed(0, [*out(flood(400)), Display("clear")])
    output.feed(0, out("after\n"))
    output.finish()
    assert "left out" not in cell.stream("stderr")
    assert cell.stream("stdout").endswith("[rank 0] after\n")


def test_display_stands_under_its_rank_after_the_text_before_it() -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    output.feed(
        1, [Stream("stdout", "before"), Display("display", {"text/plain": "<fig>", "image/png": "AA"}), Stream("stdout", "after\n")]
    )
    output.finish()
    kinds = [kind for kind, _ in cell.items]
    assert kinds == ["stdout", "display", "display", "stdout"]
    assert cell.stream("stdout") == "[rank 1] before\n[rank 1] after\n"
    assert cell.displays() == ["rank 1:", "<fig>"]


def test_update_replaces_the_display_of_its_own_rank() -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    for rank in (0, 1):
        output.feed(rank, [Display("display", {"text/plain": f"start {rank}"}, display_id="bar")])
    output.feed(1, [Display("update", {"text/plain": "end 1"}, display_id="bar")])
    output.finish()
    assert cell.displays() == ["rank 0:", "start 0", "rank 1:", "end 1"]


def values(*texts: str, **options: Any) -> list[str]:
    cell = Cell()
    output = RankOutput(cell, 1, **options)
    for rank, text in enumerate(texts):
        output.feed(rank, [Display("value", {"text/plain": text})])
    output.finish()
    return cell.displays()


def test_equal_last_expressions_are_shown_once() -> None:
    assert values("5", "5", "7", "5") == ["ranks 0-1, 3: 5\nrank 2: 7"]
    assert values("5", "5") == ["ranks 0-1: 5"]
    assert values("a\nb", "a\nb") == ["ranks 0-1:\na\nb"]
    assert values("5", label=False) == ["5"]


def test_rich_last_expressions_stand_under_their_ranks() -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    for rank in range(3):
        table = f"<table>{min(rank, 1)}</table>"
        output.feed(rank, [Display("value", {"text/plain": "table", "text/html": table})])
    output.finish()
    found = [data.get("text/html") for kind, data in cell.items if kind == "display"]
    assert found == ["<b>rank 0</b>", "<table>0</table>", "<b>ranks 1-2</b>", "<table>1</table>"]


def test_last_expression_comes_after_all_text() -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    output.feed(0, [Display("value", {"text/plain": "5"})])
    output.feed(1, out("late\n"))
    output.finish()
    assert [kind for kind, _ in cell.items] == ["stdout", "display"]


def test_clear_is_passed_on() -> None:
    cell = Cell()
    output = RankOutput(cell, 1)
    output.feed(0, [Stream("stdout", "old\n"), Display("clear", wait=True), Stream("stdout", "new\n")])
    output.finish()
    assert cell.items == [("stdout", "[rank 0] old\n"), ("clear", True), ("stdout", "[rank 0] new\n")]

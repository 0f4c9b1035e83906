"""``%%spmd --tabs`` in a real kernel: the output of each rank, equal output once, nothing lost, nothing left behind."""

from __future__ import annotations

import re

import pytest

from labkit.notebook.views.rank_items import RankItems, tabs_html, tabs_text
from tests.process.notebook import CellRun, run_cells

CELLS = {
    "load": "%load_ext labkit\nimport sys\nstreams = sys.stdout, sys.stderr, get_ipython().display_pub\n%pool start 3 --device cpu",
    "different": "%%spmd --tabs\nprint('I am', rank)\nprint('<b>not bold</b>')",
    "equal": "%%spmd --tabs\nprint('the same everywhere')",
    "two equal": "%%spmd --tabs\nprint('last' if rank == 2 else 'first')",
    "value": "%%spmd --tabs\nprint('printed', rank)\nrank * 10",
    "out": "%%spmd --tabs --out kept\nprint('printed', rank)\nrank * 10",
    "kept": "dict(kept)",
    "some ranks": "%%spmd --tabs --ranks 1,2\nprint('here', rank)",
    "stderr": "%%spmd --tabs\nimport sys\nprint('to stderr', rank, file=sys.stderr)",
    "open line": "%%spmd --tabs\nprint('no end', rank, end='')",
    "rich": (
        "%%spmd --tabs\nfrom IPython.display import HTML, display\n"
        "print('before')\ndisplay(HTML(f'<i>rank {rank}</i>'))\nprint('after')"
    ),
    "updated": (
        "%%spmd --tabs\nhandle = display(HTML('old'), display_id=True)\nprint('between')\nhandle.update(HTML(f'new {rank}'))"
    ),
    "rich value": "%%spmd --tabs\nfrom IPython.display import HTML\nprint('printed', rank)\nHTML(f'<i>{max(rank, 1)}</i>')",
    "silent": "%%spmd --tabs\nx = 1",
    "fails": "%%spmd --tabs\nprint('so far', rank)\nif rank == 1:\n    raise ValueError('on purpose')",
    "expected": "%%spmd --tabs --expect RankFailedError\nprint('so far', rank)\nraise ValueError('on purpose')",
    "restored": "(sys.stdout, sys.stderr, get_ipython().display_pub) == streams",
    "without": "%%spmd\nprint('plain', rank)",
    "slow": "%%spmd --tabs\nimport time\nfor n in range(4):\n    print('step', n, 'of', rank)\n    time.sleep(0.3)",
    "own words": (
        "from labkit.notebook.views.rank_tabs import in_tabs\n"
        "with in_tabs([0, 1]) as screen:\n    print('[rank 0] says the notebook')\n"
        "    screen.text('stderr', '[rank 1] says labkit\\n')\n    screen.text('stdout', '[rank 1] says rank 0\\n', 0)"
    ),
    "one rank": "pool.close()\n%pool start 1 --device cpu",
    "one": "%%spmd --tabs\nprint('alone')",
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CellRun]:
    return run_cells(CELLS, tmp_path_factory.mktemp("tabs"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("different", "\n".join(f"rank {rank}:\nI am {rank}\n<b>not bold</b>" for rank in range(3))),
        ("equal", "ranks 0-2:\nthe same everywhere"),
        ("two equal", "ranks 0-1:\nfirst\nrank 2:\nlast"),
        ("some ranks", "rank 1:\nhere 1\nrank 2:\nhere 2"),
        ("stderr", "\n".join(f"rank {rank}:\nto stderr {rank}" for rank in range(3))),
        ("open line", "\n".join(f"rank {rank}:\nno end {rank}" for rank in range(3))),
    ],
)
def test_each_ranks_output_stands_in_its_tab_and_equal_output_once(cells: dict[str, CellRun], name: str, text: str) -> None:
    assert cells[name].error is None
    assert cells[name].text == text


def test_displays_stand_between_the_lines_of_their_rank(cells: dict[str, CellRun]) -> None:
    page = cells["rich"].displays[0]["text/html"]
    assert re.search(r"before\n</pre><div><i>rank 2</i></div><pre[^>]*>after", page)
    assert "&lt;b&gt;not bold" in cells["different"].displays[0]["text/html"]


def test_an_updated_display_changes_where_it_stands(cells: dict[str, CellRun]) -> None:
    page = cells["updated"].displays[0]["text/html"]
    assert "<div>old</div>" not in page
    assert re.search(r"<div>new 1</div><pre[^>]*>between", page)


def test_the_last_expression_is_shown_below_or_kept(cells: dict[str, CellRun]) -> None:
    assert cells["value"].text.endswith("\nrank 0: 0\nrank 1: 10\nrank 2: 20")
    assert cells["value"].text.startswith("rank 0:\nprinted 0")
    tabs, *below = [display["text/html"] for display in cells["rich value"].displays]
    assert "<i>" not in tabs
    assert below == ["<b>ranks 0-1</b>", "<i>1</i>", "<b>rank 2</b>", "<i>2</i>"]
    assert cells["kept"].text == "{0: 0, 1: 10, 2: 20}"
    assert "printed 2" in cells["out"].text


def test_a_failure_is_raised_and_the_output_before_it_stays(cells: dict[str, CellRun]) -> None:
    assert cells["fails"].error.ename == "RankFailedError"
    assert "rank 2:\nso far 2" in cells["fails"].text
    assert cells["expected"].error is None
    assert "on purpose" in cells["expected"].text
    assert "rank 0:\nso far 0" in cells["expected"].text


def test_streams_and_displays_are_as_before_when_the_cell_has_ended(cells: dict[str, CellRun]) -> None:
    assert cells["restored"].text == "True"
    assert cells["without"].stream("stdout") == "[rank 0] plain 0\n[rank 1] plain 1\n[rank 2] plain 2\n"
    assert cells["silent"].outputs == []


def test_a_saved_notebook_holds_no_widget_of_a_cell_that_has_ended(cells: dict[str, CellRun]) -> None:
    (bundle,) = cells["slow"].displays
    assert set(bundle) == {"text/plain", "text/html"}
    assert "step 3 of 2" in bundle["text/plain"]


def test_what_the_notebook_itself_prints_is_no_ranks_whatever_it_says(cells: dict[str, CellRun]) -> None:
    assert cells["own words"].stream("stdout") == "[rank 0] says the notebook\n"
    assert cells["own words"].stream("stderr") == "[rank 1] says labkit\n"
    assert [display["text/plain"] for display in cells["own words"].displays] == ["rank 0:\n[rank 1] says rank 0"]


def test_one_rank_needs_no_tab(cells: dict[str, CellRun]) -> None:
    assert cells["one"].stream("stdout") == "alone\n"


def test_tabs_have_names_for_those_who_do_not_see_them() -> None:
    items = RankItems([0, 1])
    items.add_text(0, "a\n")
    items.add_text(1, "b\n")
    page = tabs_html(items)
    assert 'role="group" aria-label="Output by rank"' in page
    assert page.count('type="radio"') == page.count("<label") == page.count('<section aria-label="rank ') == 2
    assert tabs_text(items) == "rank 0:\na\nrank 1:\nb"

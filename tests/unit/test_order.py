"""The order in which the tests start."""

from __future__ import annotations

import pytest

from tests.order import LONG, NOTEBOOKS, TESTS, group_of, place_of

# A test of each kind, in the order in which they have to start.
STARTS = [
    "tests/unit/test_text.py::test_a",
    "tests/notebooks/test_papermill.py::test_a[00_start_here-2-ranks]",
    "tests/browser/test_jupyterlab.py::test_a[00_start_here]",
    "tests/browser/test_views.py::test_a",
    "tests/process/test_progress.py::test_a[x]",
    "tests/process/test_door.py::test_a",
    "tests/notebooks/test_style.py::test_a",
]


def test_cheap_tests_start_first_then_the_longest_groups_and_a_notebook_is_opened_after_its_run() -> None:
    shuffled = [*STARTS[3:], *STARTS[:3]]
    assert sorted(shuffled, key=place_of) == STARTS


def test_a_notebook_s_tests_are_one_group_and_so_are_those_of_the_browser_and_of_a_file() -> None:
    groups = ["00_start_here", "00_start_here", "tests/browser/", "tests/process/test_progress.py"]
    assert [group_of(nodeid) for nodeid in STARTS[1:5]] == groups


@pytest.mark.parametrize("group", LONG)
def test_a_long_group_is_a_notebook_a_file_or_a_folder(group: str) -> None:
    assert group in NOTEBOOKS or (TESTS.parent / group).exists()

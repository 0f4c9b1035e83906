"""Tab and Shift+Tab in a ``%%spmd`` cell: the names of the rank, in a real kernel."""

from __future__ import annotations

import json
from typing import Any

import pytest

from labkit.notebook import magics
from labkit.notebook.views import rank_names
from tests.process.notebook import CellRun, run_cells

ASK = """
import inspect, json
async def ask(method, code):
    answer = method(code, len(code))
    return await answer if inspect.isawaitable(answer) else answer
kernel = get_ipython().kernel
"""
QUESTIONS = {
    "no pool": "%%spmd\nonly_",
    "variable": "%%spmd\nx = only_",
    "attribute": "%%spmd\nprint(thing.xyl",
    "other rank": "%%spmd --ranks 1\nmine_",
    "first rank": "%%spmd\nmine_",
    "rank itself": "%%spmd\nworld_s",
    "import": "%%spmd\nimport torch.distributed.checkp",
    "after an open bracket": "%%spmd\nfoo(a, [thing.xyl",
    "kernel": "only_",
    "option": "%%spmd --ra",
    "options": "%%spmd --ranks 0 --",
    "loaded twice": "%%spmd\nx = only_",
    "after a death": "%%spmd\nx = only_",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CellRun]:
    def question(name: str) -> str:
        return f"print(json.dumps(await ask(kernel.do_complete, {QUESTIONS[name]!r})))"

    def look(code: str) -> str:
        return f"print(json.dumps(await ask(kernel.do_inspect, {code!r})))"

    cells = {"ask": ASK, "load": "%load_ext labkit", "no pool": question("no pool"), "pool": "%pool start 2 --device cpu"}
    cells["fill"] = (
        "%%spmd\nclass Thing:\n    '''A thing of the rank.'''\n    xylophone = 1\nthing = Thing()\nonly_on_ranks = rank\n"
        "globals()[f'mine_{rank}'] = 1\ndef add(left, right=2):\n    '''Adds.'''"
    )
    cells["kernel's"] = "only_in_kernel = 1"
    cells |= {name: question(name) for name in list(QUESTIONS)[1:-2]}
    cells |= {"inspect": look("%%spmd\nadd"), "inspect nothing": look("%%spmd\nno_such_name"), "inspect kernel": look("print")}
    cells |= {"again": "%reload_ext labkit", "loaded twice": question("loaded twice")}
    cells["variables stay"] = "%%spmd\nonly_on_ranks"
    cells["kill"] = "import os, signal\nos.kill(pool.pids[0], signal.SIGKILL)\nwhile not pool.dead_ranks: pass"
    cells["after a death"] = question("after a death")
    return run_cells(cells, tmp_path_factory.mktemp("names"))


def _reply(answers: dict[str, CellRun], name: str) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(answers[name].stream("stdout"))
    return reply


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("variable", ["only_on_ranks"]),
        ("attribute", [".xylophone"]),
        ("other rank", ["mine_1"]),
        ("first rank", ["mine_0"]),
        ("rank itself", ["world_size"]),
        ("import", ["torch.distributed.checkpoint"]),
        ("after an open bracket", [".xylophone"]),
        ("kernel", ["only_in_kernel"]),
        ("option", ["--ranks"]),
        ("options", ["--expect", "--needs", "--out", "--tabs", "--timeout"]),
        ("loaded twice", ["only_on_ranks"]),
    ],
)
def test_completion_offers_the_names_of_the_rank(answers: dict[str, CellRun], name: str, matches: list[str]) -> None:
    reply = _reply(answers, name)
    assert reply["matches"] == matches
    code = QUESTIONS[name]
    assert reply["cursor_end"] == len(code)
    assert all(match.startswith(code[reply["cursor_start"] :]) for match in matches)


@pytest.mark.parametrize("name", ["no pool", "after a death"])
def test_where_no_rank_answers_the_kernel_completes_as_ever(answers: dict[str, CellRun], name: str) -> None:
    assert answers[name].error is None
    assert "only_on_ranks" not in _reply(answers, name)["matches"]


def test_inspection_shows_what_the_rank_knows(answers: dict[str, CellRun]) -> None:
    reply = _reply(answers, "inspect")
    assert reply["found"]
    assert "add(left, right=2)" in reply["data"]["text/plain"]
    assert "Adds." in reply["data"]["text/plain"]
    assert not _reply(answers, "inspect nothing")["found"]
    assert "Prints the values" in _reply(answers, "inspect kernel")["data"]["text/plain"]


def test_asking_changes_nothing_on_the_ranks(answers: dict[str, CellRun]) -> None:
    assert answers["variables stay"].text == "rank 0: 0\nrank 1: 1"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("%%spmd --ti", ["--timeout"]),
        ("%%spmd --out x --o", []),
        ("%%spmd ", list(rank_names.OPTIONS)),
        ("%%spmd --out 'open", []),
    ],
)
def test_options_are_offered_once(line: str, offered: list[str]) -> None:
    assert rank_names.options(line) == offered


def test_every_option_of_the_magic_is_offered() -> None:
    assert tuple(action.option_strings[0] for action in magics._spmd_parser()._actions) == rank_names.OPTIONS

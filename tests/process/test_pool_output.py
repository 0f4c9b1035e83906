"""A rank's output, in whatever way it is written, appears in its own run: all of it, once, in order, with the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from labkit import RankFailedError, WorkerDiedError, WorkerPool
from labkit.controller.run import run as run_module
from labkit.controller.run.runner import Runner
from labkit.wire.messages import Failed, Output, Result, StreamName

Lines = list[tuple[int | None, str, str]]


class Recorder:
    """A screen that keeps the lines in the order in which they appeared, and the displays."""

    def __init__(self) -> None:
        self.lines: Lines = []
        self.displays: list[dict[str, Any]] = []
        self.owners: list[int | None] = []

    def text(self, name: StreamName, text: str, rank: int | None = None) -> None:
        assert text.endswith("\n")
        self.lines += [(rank, name, line) for line in text[:-1].split("\n")]

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, rank: int | None = None
    ) -> None:
        self.displays.append(data)
        self.owners.append(rank)

    def clear(self, wait: bool, rank: int | None = None) -> None: ...

    def of(self, rank: int, name: str | None = None) -> list[str]:
        return [line for owner, kind, line in self.lines if owner == rank and name in (None, kind)]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr("labkit.controller.run.runner.present_screen", lambda places: recorder)
    return recorder


# ---- the grammar -----------------------------------------------------------------------------------------------------


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[int, list[str]]]:
    """The kinds of messages that each rank sent in the runs so far, in order, except runs that make process groups."""
    messages: list[Any] = []
    started: list[int] = []
    execute = Runner.execute

    def note(self: Runner, *args: Any, **kwargs: Any) -> Any:
        started.append(self._count + 1)
        return execute(self, *args, **kwargs)

    monkeypatch.setattr(Runner, "execute", note)
    take = run_module.RunWait.take

    def listen(self: Any, message: Any, frames: Any) -> None:
        if self.run.run_id in started:
            messages.append(message)
        take(self, message, frames)

    monkeypatch.setattr(run_module.RunWait, "take", listen)

    def by_rank() -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for message in messages:
            if isinstance(message, Output | Result | Failed):
                found.setdefault(message.rank, []).append(type(message).__name__)
        return found

    return by_rank


TALK = "import sys, os\nfor i in range(200):\n    print(i)\n    print(i, file=sys.stderr)\n    os.write(1, b'raw\\n')\n"


def test_run_that_finishes_gives_its_output_and_then_one_result(
    pool: WorkerPool, screen: Recorder, heard: Callable[[], dict[int, list[str]]]
) -> None:
    pool.run_cell(TALK)
    for kinds in heard().values():
        assert kinds[-1] == "Result"
        assert set(kinds[:-1]) == {"Output"}
    assert heard().keys() == {0, 1}


def test_run_that_fails_gives_its_output_and_then_one_failure(
    pool: WorkerPool, screen: Recorder, heard: Callable[[], dict[int, list[str]]]
) -> None:
    with pytest.raises(RankFailedError):
        pool.run_cell(TALK + "import torch.distributed as dist\ndist.barrier()\nif rank == 1:\n    raise ValueError('boom')")
    assert heard()[0][-1] == "Result"
    assert heard()[1][-1] == "Failed"
    assert all(set(kinds[:-1]) == {"Output"} for kinds in heard().values())
    assert len(screen.of(1)) == 600


def test_run_on_one_rank_hears_of_no_other(pool: WorkerPool, screen: Recorder, heard: Callable[[], dict[int, list[str]]]) -> None:
    pool.run_cell("print(rank)", ranks=1)
    assert heard() == {1: ["Output", "Result"]}


def test_silent_run_gives_one_result_and_nothing_else(
    pool: WorkerPool, screen: Recorder, heard: Callable[[], dict[int, list[str]]]
) -> None:
    for _ in range(3):
        pool.run(lambda: None)
    assert heard() == {0: ["Result"] * 3, 1: ["Result"] * 3}


# ---- text ------------------------------------------------------------------------------------------------------------


def test_case_16_each_number_appears_in_its_own_run_once(pool: WorkerPool, screen: Recorder) -> None:
    for number in range(20):
        screen.lines.clear()
        pool.run_cell(f"print({number} * 10 + rank)")
        # in rank order, unless a busy machine keeps one rank waiting for longer than the screen waits
        assert sorted(screen.lines) == [(rank, "stdout", f"{number * 10 + rank}") for rank in range(2)]


def test_case_18_six_thousand_lines_on_both_streams_arrive_all_and_in_order(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell(
        "import sys\nfor i in range(3000):\n    print(f'out {i} of rank {rank}')\n"
        "    print(f'err {i} of rank {rank}', file=sys.stderr)"
    )
    for rank in range(2):
        expected = [f"{name} {number} of rank {rank}" for number in range(3000) for name in ("out", "err")]
        assert screen.of(rank) == expected
        assert screen.of(rank, "stderr") == expected[1::2]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("no newline at the end", ["no newline at the end"]),
        ("\n\nafter two blank lines\n\n", ["", "", "after two blank lines", ""]),
        ("    indented\n\tby a tab\n  \n", ["    indented", "\tby a tab", "  "]),
        ("".join(f"\r{percent}%" for percent in range(101)), ["100%"]),
        ("\r10%\r20% done\r30%\n", ["30% done"]),
        (
            "Ready Output Result Failed Bye Execute Shutdown run_id=7\n",
            ["Ready Output Result Failed Bye Execute Shutdown run_id=7"],
        ),
        ("[rank 1] labkit Traceback (most recent call last):\n", ["[rank 1] labkit Traceback (most recent call last):"]),
        ("\x1b[31mred\x1b[0m \x85 \u2028 \x0c \U0001f600\n", ["\x1b[31mred\x1b[0m \x85 \u2028 \x0c \U0001f600"]),
        ("a\x00b\n", ["a\x00b"]),
        ("\ud800 half a character\n", ["\\ud800 half a character"]),
        ("wide " + "x" * 300_000 + "\n", ["wide " + "x" * 300_000]),
    ],
    ids=[
        "unfinished",
        "blank",
        "indented",
        "progress",
        "overwritten",
        "protocol",
        "prefix",
        "controls",
        "nul",
        "surrogate",
        "wide",
    ],
)
def test_case_18_text_is_shown_as_it_was_written(pool: WorkerPool, screen: Recorder, text: str, lines: list[str]) -> None:
    pool.push(text=text)
    pool.run_cell("import sys; _ = sys.stdout.write(text)")
    assert screen.of(0) == lines
    assert screen.of(1) == lines


def test_case_18_words_of_the_protocol_end_no_run(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell(
        "import os, pickle\nfrom labkit.wire.messages import Result\n"
        "os.write(1, pickle.dumps(Result(rank, 1, None)) + b'\\n')\nprint('and goes on')"
    )
    assert screen.of(0)[-1] == "and goes on"
    assert pool.run(lambda: 1).same() == 1


def test_bytes_that_are_no_text_are_shown_as_replacement_characters(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell("import os\n_ = os.write(1, b'caf\\xc3\\xa9 \\xff\\xfe\\n')", ranks=0)
    assert screen.of(0) == ["café \ufffd\ufffd"]


def test_character_that_is_written_in_halves_is_whole(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell("import os, sys\nfor part in (b'\\xc3', b'\\xa9\\n'):\n    _ = os.write(1, part); sys.stdout.flush()", ranks=0)
    assert screen.of(0) == ["é"]


def test_streams_stay_open_whatever_a_cell_closes(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell("import sys\nprint('last', end='')\nsys.stdout.close()\nsys.stderr.close()", ranks=0)
    pool.run_cell("print('after', file=sys.stderr)\nprint('after')", ranks=0)
    assert screen.of(0) == ["last", "after", "after"]


def test_redirected_text_is_not_shown_and_the_rest_is(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell(
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as held:\n    print('hidden')\nprint('shown')",
        ranks=0,
    )
    assert screen.of(0) == ["shown"]
    assert pool.pull("held.getvalue()", ranks=0)[0] == "hidden\n"


def test_text_before_an_error_is_shown(pool: WorkerPool, screen: Recorder) -> None:
    with pytest.raises(RankFailedError):
        pool.run_cell("import sys\nprint('before', end='')\nprint('warned', file=sys.stderr)\n1 / 0")
    assert screen.of(0) == ["before", "warned"] or screen.of(0) == ["warned", "before"]


def test_text_of_functions_is_shown_like_that_of_cells(pool: WorkerPool, screen: Recorder) -> None:
    pool.run(lambda: print("from a function"))
    assert screen.of(0) == screen.of(1) == ["from a function"]


# ---- every way to write ----------------------------------------------------------------------------------------------

WAYS = {
    "os.write": "import os\n_ = os.write(1, b'seen\\n')",
    "os.write on stderr": "import os\n_ = os.write(2, b'seen\\n')",
    "binary buffer": "import sys\n_ = sys.stdout.buffer.write(b'seen\\n'); sys.stdout.flush()",
    "the original stream": "import sys\nprint('seen', file=sys.__stdout__)",
    "C printf": "import ctypes\n_ = ctypes.CDLL(None).printf(b'seen\\n')",
    "C printf without newline": "import ctypes\n_ = ctypes.CDLL(None).printf(b'seen')",
    "subprocess": "import subprocess\n_ = subprocess.run(['echo', 'seen'], check=True)",
    "os.system": "import os\n_ = os.system('echo seen')",
    "shell command": "!echo seen",
    "multiprocessing fork": "import multiprocessing\n"
    "child = multiprocessing.get_context('fork').Process(target=print, args=('seen',))\nchild.start()\nchild.join()",
    "multiprocessing spawn": "import multiprocessing\n"
    "child = multiprocessing.get_context('spawn').Process(target=print, args=('seen',))\nchild.start()\nchild.join()",
    "thread": "import threading\nt = threading.Thread(target=print, args=('seen',)); t.start(); t.join()",
    "logging": "import logging\nlogging.getLogger('case').warning('seen')",
    "warnings": "import warnings\nwarnings.warn_explicit('seen', UserWarning, 'x', 1, registry={})",
}


@pytest.mark.parametrize("way", WAYS)
def test_case_19_whatever_writes_is_visible_with_the_rank(pool: WorkerPool, screen: Recorder, way: str) -> None:
    pool.run_cell(WAYS[way])
    for rank in range(2):
        assert sum("seen" in line for line in screen.of(rank)) == 1


def test_text_of_all_writers_keeps_its_order(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell(
        "import os, subprocess, sys\nfor i in range(5):\n    print('python', i)\n    _ = os.write(1, b'raw\\n')\n"
        "    _ = subprocess.run(['echo', 'child'])\n    print('error', i, file=sys.stderr)",
        ranks=0,
    )
    assert screen.of(0) == [text for i in range(5) for text in (f"python {i}", "raw", "child", f"error {i}")]


def test_case_3_dataset_of_a_cell_feeds_a_dataloader_with_workers(pool: WorkerPool, screen: Recorder) -> None:
    results = pool.run_cell(
        "import torch\nfrom torch.utils.data import DataLoader, Dataset\n"
        "class Squares(Dataset):\n"
        "    def __len__(self):\n        return 6\n"
        "    def __getitem__(self, index):\n        print('item', index)\n        return torch.tensor(index ** 2)\n"
        "sorted(int(value) for batch in DataLoader(Squares(), batch_size=2, num_workers=2) for value in batch)",
        want_value=True,
    )
    assert results is not None
    assert results.same() == [0, 1, 4, 9, 16, 25]
    for rank in range(2):
        assert sorted(screen.of(rank)) == [f"item {index}" for index in range(6)]


def test_case_3_process_started_in_a_cell_prints_and_answers(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell(
        "import multiprocessing as mp\n"
        "def child(queue):\n    print('hello from a child of', rank)\n    queue.put(rank * 10)\n"
        "context = mp.get_context('fork')\nqueue = context.Queue()\nprocess = context.Process(target=child, args=(queue,))\n"
        "process.start()\nanswer = queue.get(timeout=20)\nprocess.join()"
    )
    assert screen.of(1) == ["hello from a child of 1"]
    assert dict(pool.pull("(answer, process.exitcode)")) == {0: (0, 0), 1: (10, 0)}


def test_lines_of_several_children_do_not_mix(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell(
        "import multiprocessing as mp\n"
        "def talk(name):\n    for i in range(300):\n        print('child', name, 'line', i)\n"
        "children = [mp.get_context('fork').Process(target=talk, args=(name,)) for name in range(4)]\n"
        "for child in children:\n    child.start()\nfor child in children:\n    child.join()",
        ranks=0,
    )
    lines = screen.of(0)
    for name in range(4):
        mine = [line for line in lines if line.startswith(f"child {name} ")]
        assert mine == [f"child {name} line {i}" for i in range(300)]
    assert len(lines) == 1200


def test_tqdm_shows_its_last_state_as_text(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell("from tqdm import tqdm\nfor _ in tqdm(range(50), desc='steps', mininterval=0):\n    pass")
    for rank in range(2):
        (bar,) = screen.of(rank, "stderr")
        assert bar.startswith("steps: 100%")
        assert "50/50" in bar


def test_output_that_comes_after_a_run_is_not_lost(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell(
        "import threading\ngo = threading.Event()\n"
        "late = threading.Thread(target=lambda: (go.wait(20), print('late')))\nlate.start()",
        ranks=0,
    )
    assert screen.of(0) == []
    pool.run_cell("go.set(); late.join()", ranks=0)
    assert screen.of(0) == ["late"]


# ---- displays --------------------------------------------------------------------------------------------------------


def test_last_expression_is_shown_once_for_equal_ranks(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell("world_size + 1")
    pool.run_cell("rank")
    pool.run_cell("rank;")
    pool.run_cell("None")
    assert [data["text/plain"] for data in screen.displays] == ["ranks 0-1: 3", "rank 0: 0\nrank 1: 1"]


def test_table_and_figure_stand_under_their_rank(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell(
        "import matplotlib.pyplot as plt\nimport pandas as pd\nfrom IPython.display import display\n"
        "plt.plot([1, 2])\nplt.show()\ndisplay(pd.DataFrame({'rank': [rank]}))"
    )
    kinds = [
        "html" if "<table" in data.get("text/html", "") else "png" if "image/png" in data else data["text/plain"]
        for data in screen.displays
    ]
    assert sorted(screen.owners) == [0, 0, 1, 1]
    assert kinds.count("png") == 2
    assert kinds.count("html") == 2
    pool.run_cell("plt.close('all')")


def test_figure_of_a_function_is_shown(pool: WorkerPool, screen: Recorder) -> None:
    def draw() -> None:
        import matplotlib.pyplot as plt

        plt.plot([1, 2, 3])

    pool.run(draw)
    assert sum("image/png" in data for data in screen.displays) == 2
    screen.displays.clear()
    pool.run(lambda: None)
    assert screen.displays == []


# ---- death -----------------------------------------------------------------------------------------------------------


def test_rank_that_dies_gives_its_last_words_and_then_one_failure(
    pool: WorkerPool, screen: Recorder, heard: Callable[[], dict[int, list[str]]]
) -> None:
    with pytest.raises(WorkerDiedError, match="rank 1") as caught:
        pool.run_cell("import os\nif rank == 1:\n    print('my last words')\n    os._exit(7)")
    assert screen.of(1) == ["my last words"]
    assert heard() == {0: ["Result"], 1: ["Output", "Failed"]}
    (failure,) = [failure for failure in caught.value.failures if failure.kind == "died"]
    assert (failure.rank, failure.exitcode) == (1, 7)
    assert "my last words" in failure.last_output
    assert "pool.restart()" in str(caught.value)
    pool.restart()
    assert pool.run(lambda: 1).same() == 1


def test_rank_that_closes_its_output_for_good_lives_on(pool: WorkerPool, screen: Recorder) -> None:
    pool.run_cell("import os\nos.close(1)", ranks=0)
    with pytest.raises(RankFailedError, match="Bad file descriptor"):
        pool.run_cell("print('nowhere')", ranks=0)
    assert pool.run(lambda: 1).same() == 1

"""An error on a rank fails the run, names the ranks, shows the reader's own lines, and leaves the pool as it was."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import labkit
from labkit import RankFailedError, WorkerDiedError, WorkerPool
from labkit.errors import RankFailure, RunReport

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerPool]:
    with WorkerPool(4, device="cpu", replace=True) as pool:
        yield pool


@pytest.fixture
def pool(shared: WorkerPool) -> Iterator[WorkerPool]:
    """A pool that after each error must still have all its ranks, their variables and a working process group."""
    shared.run_cell("kept = rank * 3")
    yield shared
    total = "import torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\n(kept, float(ones))"
    results = shared.run_cell(total, want_value=True, timeout_s=30)
    assert results is not None
    assert dict(results) == {rank: (rank * 3, 4.0) for rank in range(4)}


def failure_of(act: Callable[[], Any]) -> RankFailedError:
    with pytest.raises(RankFailedError) as caught:
        act()
    return caught.value


def rendered(error: RunReport) -> str:
    """The text that the notebook shows."""
    return _ANSI.sub("", "\n".join(error._render_traceback_()))


# ---- which ranks -----------------------------------------------------------------------------------------------------


def test_case_17_every_rank_raises_and_the_traceback_is_shown_once(pool: WorkerPool) -> None:
    error = failure_of(lambda: pool.run_cell("def inner(x):\n    return x / 0\n\ninner(1)"))
    text = rendered(error)
    assert error.failed_ranks == (0, 1, 2, 3)
    assert text.count("return x / 0") == 2  # once as the failing line, once as context of the line that called it
    assert text.count("ZeroDivisionError: division by zero\n") == 1
    assert "ranks 0-3" in text


def test_case_17_a_different_error_is_shown_too(pool: WorkerPool) -> None:
    error = failure_of(lambda: pool.run_cell("if rank == 2:\n    {}['w']\nraise ValueError('same')"))
    text = rendered(error)
    assert "KeyError: 'w'" in text
    assert text.count("ValueError: same\n") == 1
    assert "ranks 0-1, 3: ValueError: same; rank 2: KeyError: 'w'" in str(error)


def test_case_17_same_error_with_a_different_message_is_shown_for_each(pool: WorkerPool) -> None:
    text = rendered(failure_of(lambda: pool.run_cell("raise ValueError(f'I am {rank}')")))
    for rank in range(4):
        assert text.count(f"ValueError: I am {rank}\n") == 1


def test_failed_finished_and_interrupted_ranks_are_named(pool: WorkerPool) -> None:
    error = failure_of(
        lambda: pool.run_cell("import time\nif rank == 1:\n    raise ValueError('boom')\nif rank != 3:\n    time.sleep(60)")
    )
    assert error.failed_ranks == (1,)
    assert error.interrupted_ranks == (0, 2)
    assert error.finished == (3,)
    lines = str(error).splitlines()
    assert lines[0] == "rank 1: ValueError: boom"
    assert any("ranks 0, 2" in line and "interrupted" in line for line in lines)
    assert any("rank 3 finished" in line for line in lines)


def test_ranks_that_wait_for_the_failed_one_are_released_and_not_called_failed(pool: WorkerPool) -> None:
    error = failure_of(
        lambda: pool.run_cell("import torch.distributed as dist\nif rank == 1:\n    raise ValueError('boom')\ndist.barrier()")
    )
    assert error.failed_ranks == (1,)
    assert error.interrupted_ranks == (0, 2, 3)
    assert str(error).startswith("rank 1: ValueError: boom")
    assert "Connection closed" not in rendered(error)


def test_error_on_a_chosen_rank_concerns_that_rank_only(pool: WorkerPool) -> None:
    error = failure_of(lambda: pool.run_cell("raise ValueError('boom')", ranks=[1, 3]))
    assert error.failed_ranks == (1, 3)
    assert error.finished == ()


# ---- which lines -----------------------------------------------------------------------------------------------------


def test_traceback_shows_the_cells_own_lines_and_none_of_labkit(pool: WorkerPool) -> None:
    cell = "a = 1\nb = 2\n\ndef spread(x):\n    y = x + 1\n    return y / 0\n\nspread(b)"
    text = rendered(failure_of(lambda: pool.run_cell(cell, cell_number=12)))
    assert re.search(r"Cell In\[12\], line 8\n", text)
    assert re.search(r"Cell In\[12\], line 6, in spread\n", text)
    assert re.search(r"----> +6 +return y / 0", text)
    assert re.search(r"----> +8 +spread\(b\)", text)
    assert "labkit/" not in text
    assert "IPython" not in text


def test_function_of_an_earlier_cell_shows_the_lines_of_that_cell(pool: WorkerPool) -> None:
    pool.run_cell("def divide(x):\n    return x / 0  # the culprit", cell_number=3)
    text = rendered(failure_of(lambda: pool.run_cell("divide(1)", cell_number=4)))
    assert re.search(r"Cell In\[4\], line 1\n", text)
    assert re.search(r"Cell In\[3\], line 2, in divide\n", text)
    assert "# the culprit" in text


def test_two_cells_with_the_same_text_keep_their_numbers(pool: WorkerPool) -> None:
    for number in (5, 6):
        text = rendered(failure_of(lambda number=number: pool.run_cell("1 / 0", cell_number=number)))
        assert f"Cell In[{number}], line 1" in text


def test_library_frames_take_one_line_each(pool: WorkerPool) -> None:
    text = rendered(failure_of(lambda: pool.run_cell("import json\njson.loads('{')")))
    library = [line for line in text.splitlines() if "/json/" in line]
    assert library
    assert all(re.search(r"\.py, line \d+, in \w+$", line) for line in library)
    assert text.count("---->") == 1


def test_cause_and_context_are_shown_before_the_error(pool: WorkerPool) -> None:
    cell = "try:\n    int('x')\nexcept ValueError as error:\n    raise RuntimeError('outer') from error"
    text = rendered(failure_of(lambda: pool.run_cell(cell)))
    assert text.index("invalid literal for int()") < text.index("direct cause") < text.index("RuntimeError: outer")
    assert "int('x')" in text
    context = rendered(failure_of(lambda: pool.run_cell(cell.replace(" from error", ""))))
    assert "During handling of the above exception" in context
    suppressed = rendered(failure_of(lambda: pool.run_cell(cell.replace("from error", "from None"))))
    assert "invalid literal" not in suppressed


def test_groups_and_notes_are_shown(pool: WorkerPool) -> None:
    cell = "error = ExceptionGroup('several', [ValueError('first'), KeyError('second')])\nerror.add_note('look here')\nraise error"
    text = rendered(failure_of(lambda: pool.run_cell(cell)))
    for part in ("several (2 sub-exceptions)", "ValueError: first", "KeyError: 'second'", "look here"):
        assert part in text


def test_endless_recursion_is_cut_to_a_readable_length(pool: WorkerPool) -> None:
    text = rendered(failure_of(lambda: pool.run_cell("def down(n):\n    return down(n + 1)\ndown(0)")))
    assert "RecursionError: maximum recursion depth exceeded" in text
    assert "frames left out" in text
    assert len(text.splitlines()) < 250


def test_function_sent_with_run_shows_its_lines(pool: WorkerPool) -> None:
    def broken() -> None:
        raise ValueError("in the function")  # its own line

    text = rendered(failure_of(lambda: pool.run(broken)))
    assert "# its own line" in text
    assert ", in broken" in text
    assert "labkit/" not in text


def test_error_with_a_broken_message_is_reported_and_kills_no_rank(pool: WorkerPool) -> None:
    error = failure_of(lambda: pool.run_cell("class Odd(Exception):\n    def __str__(self):\n        1 / 0\nraise Odd"))
    assert "Odd" in str(error)
    assert error.failed_ranks == (0, 1, 2, 3)


def test_error_of_a_library_class_is_named_with_its_module(pool: WorkerPool) -> None:
    assert "json.decoder.JSONDecodeError" in str(failure_of(lambda: pool.run_cell("import json\njson.loads('{')")))


def test_failure_fields_can_be_read_by_code(pool: WorkerPool) -> None:
    (failure,) = failure_of(lambda: pool.run_cell("raise KeyError('w')", ranks=2)).failures
    assert isinstance(failure, RankFailure)
    assert (failure.rank, failure.kind, failure.type_name, failure.message) == (2, "exception", "KeyError", "'w'")


def test_nothing_of_a_failed_cell_stays_in_memory(pool: WorkerPool) -> None:
    cell = (
        "import weakref\nclass Big: ...\ndef hold():\n    global probe\n    big = Big()\n    probe = weakref.ref(big)\n    1 / 0\n"
    )
    failure_of(lambda: pool.run_cell(cell + "hold()"))
    assert pool.pull("probe() is None").same() is True
    failure_of(lambda: pool.run_cell("try:\n    hold()\nexcept ZeroDivisionError as error:\n    raise ValueError from error"))
    assert pool.pull("probe() is None").same() is True


# ---- what is no exception --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["raise SystemExit", "exit()", "quit()", "import sys\nsys.exit(3)", "raise SystemExit('done')"])
def test_exit_ends_the_cell_and_not_the_rank(pool: WorkerPool, capsys: pytest.CaptureFixture[str], cell: str) -> None:
    before = pool.pids
    error = failure_of(lambda: pool.run_cell(cell))
    assert {failure.kind for failure in error.failures} == {"exited"}
    assert "the rank lives on" in str(error)
    assert pool.pids == before
    assert capsys.readouterr() == ("", "")


def test_exit_in_a_function_ends_the_call_and_not_the_rank(pool: WorkerPool) -> None:
    def leave() -> None:
        raise SystemExit(4)

    assert "the rank lives on" in str(failure_of(lambda: pool.run(leave)))


def test_keyboard_interrupt_of_the_cells_own_is_no_success(pool: WorkerPool) -> None:
    error = failure_of(lambda: pool.run_cell("if rank == 1:\n    raise KeyboardInterrupt"))
    assert error.finished == (0, 2, 3)
    assert [failure.rank for failure in error.failures] == [1]


def test_process_that_a_cell_forks_ends_with_the_cell_and_is_no_second_rank(
    pool: WorkerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    fork = (
        "import os\npid = os.fork()\nif pid == 0:\n    {}\nelse:\n    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\ncode"
    )
    for end, code in (("code = print('the child', end='')", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1)):
        results = pool.run_cell(fork.format(end), want_value=True, ranks=0, timeout_s=20)
        assert results is not None
        assert results[0] == code
    shown = capsys.readouterr()
    assert shown.out == "[rank 0] the child\n"
    assert shown.err.count("ZeroDivisionError") == 1


def test_input_fails_and_does_not_wait(pool: WorkerPool) -> None:
    assert "EOFError" in str(failure_of(lambda: pool.run_cell("input('your name? ')", timeout_s=20)))


def test_debugger_ends_the_cell_and_does_not_wait(pool: WorkerPool) -> None:
    assert "BdbQuit" in str(failure_of(lambda: pool.run_cell("x = 1\nbreakpoint()\nx = 2", timeout_s=20)))


def test_syntax_error_while_the_cell_runs_is_an_error_of_the_ranks(pool: WorkerPool) -> None:
    error = failure_of(lambda: pool.run_cell("ran = True\nexec('x = (')", cell_number=9))
    assert "SyntaxError: '(' was never closed" in str(error)
    assert "Cell In[9], line 2" in rendered(error)
    assert pool.pull("ran").same() is True


# ---- the cell as in a notebook ---------------------------------------------------------------------------------------


def value_of(pool: WorkerPool, cell: str) -> Any:
    results = pool.run_cell(cell, want_value=True, timeout_s=60)
    assert results is not None
    return results.same()


def test_top_level_await_works(pool: WorkerPool) -> None:
    assert value_of(pool, "import asyncio\nasync def later():\n    await asyncio.sleep(0.01)\n    return 7\nawait later()") == 7


def test_shell_commands_work_and_give_their_output(pool: WorkerPool) -> None:
    assert value_of(pool, "lines = !echo one && echo two\nlist(lines)") == ["one", "two"]


def test_shell_command_takes_variables_of_the_rank(pool: WorkerPool) -> None:
    pool.push(word="hello")
    assert value_of(pool, "lines = !echo {word} $word\nlist(lines)") == ["hello hello"]


def test_line_magics_work(pool: WorkerPool, tmp_path: Any) -> None:
    assert value_of(pool, f"where = %pwd\n%cd -q {tmp_path}\nhere = %pwd\n%cd -q {{where}}\nhere") == str(tmp_path)


def test_cell_magic_inside_the_cell_works(pool: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run_cell("%%capture held\nprint('not shown')")
    assert capsys.readouterr().out == ""
    assert value_of(pool, "held.stdout") == "not shown\n"
    pool.run_cell("%%time\ntimed = 5")
    assert value_of(pool, "timed") == 5


def test_underscore_help_and_docstrings_do_not_disturb(pool: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run_cell("len?", ranks=0)
    assert "Return the number of items" in capsys.readouterr().out


@pytest.mark.parametrize(("method", "left"), [("__repr__", ""), ("_repr_html_", "Broken object")])
def test_object_that_cannot_be_shown_says_why_and_fails_no_cell(
    pool: WorkerPool, capsys: pytest.CaptureFixture[str], method: str, left: str
) -> None:
    pool.run_cell(f"class Broken:\n    def {method}(self):\n        raise RuntimeError('cannot be shown')\nBroken()", ranks=0)
    shown = capsys.readouterr()
    assert "[rank 0] RuntimeError: cannot be shown" in shown.err
    assert left.split(" ", maxsplit=1)[0] in shown.out


def test_matplotlib_magic_is_taken(pool: WorkerPool) -> None:
    assert value_of(pool, "%matplotlib inline\nimport matplotlib\nmatplotlib.get_backend()").endswith("inline")


def test_future_import_of_one_cell_does_not_leak_into_labkit(pool: WorkerPool) -> None:
    pool.run_cell("from __future__ import annotations\ndef f(x: Unknown) -> None: ...")
    assert value_of(pool, "f.__annotations__['x']") == "Unknown"


# ---- refused before anything is sent ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell",
    ["x = (", "def f():\n    return 1\n  y = 2", "if True:\nprint(1)", "return 5", "for x in range(3)", "'unclosed", "%%\nx = ("],
)
def test_syntax_error_is_raised_before_anything_is_sent(pool: WorkerPool, cell: str) -> None:
    pool.run_cell("ran = False")
    with pytest.raises(SyntaxError):
        pool.run_cell("ran = True\n" + cell)
    assert pool.pull("ran").same() is False


def test_reset_leaves_a_rank_its_own_names(pool: WorkerPool) -> None:
    pool.run_cell("gone = 1\n%reset -f")
    assert pool.pull("(rank, world_size, device.type, 'gone' in globals())") == {rank: (rank, 4, "cpu", False) for rank in range(4)}
    pool.run_cell("kept = rank * 3")


def test_warning_names_the_cell(pool: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run_cell("import warnings\nif rank == 0: warnings.warn('look out')", cell_number=7)
    assert "[rank 0] Cell In[7]:2: UserWarning: look out\n" in capsys.readouterr().err


# ---- outside a notebook ----------------------------------------------------------------------------------------------


def test_p10_error_shows_the_ranks_traceback_and_one_frame_of_labkit_wherever_it_is_printed(pool: WorkerPool) -> None:
    cell = "def f():\n    raise ValueError('boom')\nif rank == 1: f()"
    with pytest.raises(RankFailedError) as caught:
        pool.run_cell(cell, cell_number=7)
    error = pickle.loads(pickle.dumps(caught.value)).with_traceback(caught.value.__traceback__)
    shown = "".join(traceback.format_exception(error))
    assert "rank 1:\nCell In[7], line 3\n" in shown
    assert "Cell In[7], line 2, in f\n" in shown
    own = str(Path(labkit.__file__).parent)
    assert sum(own in line for line in shown.splitlines()) == 1
    assert shown.count("ValueError: boom") == 2  # the headline and the traceback


def test_p10_death_shows_its_last_output_wherever_it_is_printed() -> None:
    failure = RankFailure(1, "died", "SIGABRT", "native code gave up", last_output="assertion failed", exitcode=-6)
    shown = "".join(traceback.format_exception(WorkerDiedError([failure])))
    assert "rank 1:\ndied (SIGABRT): native code gave up\nIts last output in this run:\n    assertion failed" in shown


def test_p10_pytest_shows_the_line_of_the_test_and_the_ranks_traceback_and_no_frame_of_labkit(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(
        "from labkit.controller.pool import WorkerPool\n\n\ndef test_it():\n    with WorkerPool(1, 'cpu') as pool:\n"
        "        pool.run_cell('1 / 0', cell_number=3)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(test)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    assert "E           Cell In[3], line 1\n" in shown, shown
    assert f"{test.name}:6: RankFailedError" in shown
    assert "labkit/controller" not in shown

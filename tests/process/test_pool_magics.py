"""The magics in a real kernel: valid lines, invalid lines, and equivalence with calls of the pool."""

from __future__ import annotations

import re

import pytest

from tests.process.notebook import CellRun, run_cells

CELLS = {
    "load": "%load_ext labkit",
    "load again": "%load_ext labkit",
    "reload": "%reload_ext labkit",
    "no pool": "%%spmd\n1",
    "status without pool": "%pool",
    "restart without pool": "%pool restart",
    "start": "%pool start 3 --device cpu",
    "status": "%pool",
    "status by name": "%pool status",
    "variable": "(pool.world_size, pool.device)",
    "start second": "%pool start 2",
    "plain": "%%spmd\nrank * 10",
    "semicolon": "%%spmd\nrank;",
    "ranks": "%%spmd --ranks 0,2\nrank",
    "ranks with spaces and a comment": "%%spmd --ranks 0, 2  # not the middle one\nrank",
    "unfilled": "%%spmd --timeout {limit_s}\n1",
    "ranks from variable": "who = '1-2'",
    "ranks expanded": "%%spmd --ranks {who}\nrank",
    "out": "%%spmd --out values\nrank ** 2",
    "out value": "(type(values).__name__, dict(values))",
    "out on some": "%%spmd --ranks 1 --out one\n'x'",
    "out on some value": "dict(one)",
    "out of nothing": "%%spmd --out nothing\nx = 1",
    "out and print": "%%spmd --out printed\nprint('text', rank)\nrank",
    "timeout": "%%spmd --timeout 1\nimport time\ntime.sleep(60)",
    "timeout not reached": "%%spmd --timeout 60\nrank",
    "needs more": "%%spmd --needs 9\nran = True",
    "needs more value": "%%spmd\n'ran' in globals()",
    "needs fewer": "%%spmd --needs 3\nrank",
    "expect": "%%spmd --expect RankFailedError\nraise ValueError('on purpose')",
    "expect in vain": "%%spmd --expect RankFailedError\n1",
    "expect unknown": "%%spmd --expect NoSuchError\n1",
    "await": "%%spmd\nimport asyncio\nawait asyncio.sleep(0.01, rank)",
    "shell": "%%spmd\n!echo from {rank}",
    "magic inside": "%%spmd\n%pwd",
    "cell magic inside": "%%spmd\n%%capture held\nprint('hidden')",
    "cell magic inside value": "%%spmd\nheld.stdout",
    "syntax": "%%spmd\nok = 1\nx = (\ny = 2",
    "return": "%%spmd\nreturn 5",
    "exit": "%%spmd\nexit()",
    "alive": "%%spmd\nrank",
    "kernel value": "%%spmd\nwho + 'x'",
    "kernel pool": "%%spmd\npool.world_size",
    "kernel module": "import colorsys\nNone",
    "kernel module on ranks": "%%spmd\ncolorsys.ONE_THIRD",
    "unknown everywhere": "%%spmd\nnowhere",
    "unknown option": "%%spmd --nonsense\n1",
    "stray word": "%%spmd fast\n1",
    "open quote": "%%spmd --out 'x\n1",
    "timeout word": "%%spmd --timeout soon\n1",
    "timeout zero": "%%spmd --timeout 0\n1",
    "timeout negative": "%%spmd --timeout=-1\n1",
    "timeout nan": "%%spmd --timeout nan\n1",
    "out number": "%%spmd --out 1x\n1",
    "out dotted": "%%spmd --out a.b\n1",
    "out keyword": "%%spmd --out class\n1",
    "ranks outside": "%%spmd --ranks 0-5\n1",
    "ranks word": "%%spmd --ranks first\n1",
    "pool word": "%pool dance",
    "close what": "%pool close 2",
    "status of what": "%pool status 0",
    "start what": "%pool start four",
    "start too much": "%pool start 3 4",
    "restart with a device": "%pool restart --device cpu",
    "restart nobody": "%pool restart 7",
    "keep": "%%spmd\nkept = rank",
    "restart one": "%pool restart 2",
    "restarted one": "%%spmd\n'kept' in globals()",
    "keep again": "%%spmd\nkept = rank",
    "restart two": "%pool restart 0, 2",
    "restarted two": "%%spmd\n'kept' in globals()",
    "restart": "%pool restart",
    "restarted": "%%spmd\n'x' in globals()",
    "start in its place": "%pool start 2 --device cpu --replace",
    "started in its place": "%%spmd\nrank",
    "close": "%pool close",
    "closed": "%%spmd\n1",
    "start none": "%pool start 0",
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CellRun]:
    return run_cells(CELLS, tmp_path_factory.mktemp("magics"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("variable", "(3, 'cpu')"),
        ("plain", "rank 0: 0\nrank 1: 10\nrank 2: 20"),
        ("semicolon", ""),
        ("ranks", "rank 0: 0\nrank 2: 2"),
        ("ranks with spaces and a comment", "rank 0: 0\nrank 2: 2"),
        ("ranks expanded", "rank 1: 1\nrank 2: 2"),
        ("out", ""),
        ("out value", "('RankResults', {0: 0, 1: 1, 2: 4})"),
        ("out on some value", "{1: 'x'}"),
        ("timeout not reached", "rank 0: 0\nrank 1: 1\nrank 2: 2"),
        ("needs more", "skipped: this cell needs at least 9 ranks, the pool has 3."),
        ("needs more value", "ranks 0-2: False"),
        ("needs fewer", "rank 0: 0\nrank 1: 1\nrank 2: 2"),
        ("await", "rank 0: 0\nrank 1: 1\nrank 2: 2"),
        ("cell magic inside", ""),
        ("cell magic inside value", r"ranks 0-2: 'hidden\n'"),
        ("alive", "rank 0: 0\nrank 1: 1\nrank 2: 2"),
        ("restarted", "ranks 0-2: False"),
        ("restarted one", "ranks 0-1: True\nrank 2: False"),
        ("restarted two", "ranks 0, 2: False\nrank 1: True"),
        ("started in its place", "rank 0: 0\nrank 1: 1"),
    ],
)
def test_c3_p16_cell_shows(cells: dict[str, CellRun], name: str, text: str) -> None:
    assert cells[name].error is None, cells[name].text
    assert cells[name].text == text


def test_extension_can_be_loaded_more_than_once(cells: dict[str, CellRun]) -> None:
    for name in ("load", "load again", "reload"):
        assert cells[name].error is None


def test_status_says_what_the_pool_is_or_how_to_start_one(cells: dict[str, CellRun]) -> None:
    assert re.match(
        r"no pool is open; the fork server is (warm|warming up)\. Start one with %pool start 4", cells["status without pool"].text
    )
    for name in ("start", "status", "status by name"):
        assert cells[name].text.startswith("WorkerPool(world_size=3, device='cpu')")
    assert "fresh and have no variables.\n\nWorkerPool(world_size=3, device='cpu')" in cells["restart"].text
    assert cells["close"].text.endswith("closed")


def test_kept_values_do_not_hide_what_is_printed(cells: dict[str, CellRun]) -> None:
    assert sorted(cells["out and print"].stream("stdout").splitlines()) == [f"[rank {rank}] text {rank}" for rank in range(3)]


def test_shell_command_and_line_magic_run_on_each_rank(cells: dict[str, CellRun]) -> None:
    assert sorted(cells["shell"].stream("stdout").splitlines()) == [f"[rank {rank}] from {rank}" for rank in range(3)]
    assert cells["magic inside"].text.startswith("ranks 0-2: '")


def test_expected_error_passes_the_cell_and_shows_as_lesson(cells: dict[str, CellRun]) -> None:
    assert cells["expect"].error is None
    assert "ValueError: on purpose" in cells["expect"].text


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("no pool", "PoolStateError", "no pool is open. Start one with"),
        ("restart without pool", "PoolStateError", "no pool is open. Start one with"),
        ("start second", "PoolStateError", "close it (%pool close), or start this one in its place: %pool start 2 --replace."),
        ("close what", "MagicUsageError", "unrecognized arguments: 2\nusage: %pool close"),
        ("status of what", "MagicUsageError", "unrecognized arguments: 0\nusage: %pool status"),
        ("start what", "MagicUsageError", "argument N: invalid int value: 'four'\nusage: %pool start"),
        ("start too much", "MagicUsageError", "unrecognized arguments: 4\nusage: %pool start"),
        ("restart with a device", "MagicUsageError", "unrecognized arguments: --device\nusage: %pool restart [RANKS ...]"),
        ("restart nobody", "RankSpecError", "rank 7 out of range"),
        ("timeout", "RunTimeoutError", "the run did not finish in 1 s"),
        ("expect in vain", "ExpectationError", "expected RankFailedError, but nothing was raised"),
        ("expect unknown", "MagicUsageError", "labkit has no error called 'NoSuchError'"),
        ("return", "CellSyntaxError", "'return' outside function"),
        ("exit", "RankFailedError", "the rank lives on"),
        ("kernel value", "RankFailedError", "The kernel has who, the ranks do not: pool.push(who=who) sends it."),
        ("kernel pool", "RankFailedError", "pool exists only in the kernel, which steers the ranks"),
        ("kernel module on ranks", "RankFailedError", "import it in a %%spmd cell"),
        ("unknown everywhere", "RankFailedError", "name 'nowhere' is not defined"),
        ("unknown option", "MagicUsageError", "unrecognized arguments: --nonsense"),
        ("stray word", "MagicUsageError", "unrecognized arguments: fast"),
        ("open quote", "MagicUsageError", "No closing quotation"),
        ("timeout word", "MagicUsageError", "argument --timeout: invalid float value: 'soon'"),
        ("timeout zero", "InvalidRunError", "a number above 0, not 0.0"),
        ("timeout negative", "InvalidRunError", "a number above 0, not -1.0"),
        ("timeout nan", "InvalidRunError", "a number above 0, not nan"),
        ("out of nothing", "MagicUsageError", "End the cell with the expression that nothing is to hold"),
        ("unfilled", "MagicUsageError", "{limit_s} is not defined in this notebook"),
        ("out number", "MagicUsageError", "--out takes a variable's name, not '1x'"),
        ("out dotted", "MagicUsageError", "--out takes a variable's name, not 'a.b'"),
        ("out keyword", "MagicUsageError", "--out takes a variable's name, not 'class'"),
        ("ranks outside", "RankSpecError", "rank 3 out of range: this pool has 3 ranks, 0 to 2"),
        ("ranks word", "RankSpecError", "cannot read the rank set 'first'"),
        ("pool word", "MagicUsageError", "'dance' is not an action. Write one of status, follow, start, restart, close."),
        ("closed", "PoolStateError", "no pool is open. Start one with"),
        ("start none", "InvalidPoolError", "at least 1, not 0"),
    ],
)
def test_c3_p16_cell_fails_and_says_what_to_do(cells: dict[str, CellRun], name: str, kind: str, says: str) -> None:
    error = cells[name].error
    assert error is not None, cells[name].text
    assert error.ename == kind
    assert says in cells[name].text
    assert "labkit/" not in cells[name].text


def test_a_name_that_nobody_has_gets_no_advice(cells: dict[str, CellRun]) -> None:
    assert "The kernel has" not in cells["unknown everywhere"].text


def test_syntax_error_shows_the_cells_line_and_says_that_nothing_was_sent(cells: dict[str, CellRun]) -> None:
    assert cells["syntax"].error.ename == "CellSyntaxError"
    text = cells["syntax"].text
    assert "nothing was sent to the ranks" in text
    # counted with the magic's line as the first, as in the notebook
    assert "line 3 of the cell" in text
    assert "    x = (\n" in text

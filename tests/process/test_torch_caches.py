"""torch compiles for labkit in a folder of the user's: a neighbour can neither run code through it nor block it."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.base import torch_caches
from tests.conftest import TESTS

COMPILES = """
import os
import labkit
{how}
CELL = '''
import os, pathlib, torch
from torch._inductor import codecache
{compile}
sorted({{os.environ["TORCHINDUCTOR_CACHE_DIR"], codecache.cache_dir(), str(pathlib.Path(codecache._HEADER_DIR).parent)}})
'''
if __name__ == "__main__":
    with labkit.WorkerPool(1, device="cpu"{options}) as pool:
        print(*pool.run_cell(CELL, want_value=True).same())
"""
STARTS = {
    "fork server": COMPILES.format(how="", options="", compile="torch.compile(lambda x: torch.sin(x) * 3 + x)(torch.zeros(2))"),
    "spawn": COMPILES.format(how="os.environ['LABKIT_START'] = 'spawn'", options="", compile=""),
    "agents": COMPILES.format(how="", options=", launcher='agents'", compile=""),
}
TAKEN = f"torchinductor_{getpass.getuser()}"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to another user")


def compiled_in(program: str, folder: Path, environ: dict[str, str]) -> list[str]:
    """The folders in which a pool's rank keeps compiled code."""
    script = folder / "program.py"
    script.write_text(program)
    (folder / "tmp").mkdir(exist_ok=True)
    given = {name: value for name, value in os.environ.items() if name != torch_caches.VARIABLE}
    given |= {"HOME": str(folder), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(TESTS.parent), **environ}
    given.pop("XDG_CACHE_HOME", None)
    done = subprocess.run([sys.executable, script], env=given, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


@pytest.mark.parametrize("program", STARTS.values(), ids=STARTS)
def test_h2_a_neighbours_file_in_the_place_of_torchs_cache_neither_runs_nor_stops_a_pool(program: str, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / TAKEN).write_text("a neighbour's")
    (used,) = compiled_in(program, tmp_path, {})
    assert used.startswith(str(tmp_path / ".cache" / "labkit" / "torchinductor"))
    assert Path(used).stat().st_mode & 0o777 == 0o700
    assert not os.listdir(used) or {"fxgraph", "precompiled_headers"} <= set(os.listdir(used))
    assert (tmp_path / "tmp" / TAKEN).read_text() == "a neighbour's"


def test_h2_a_users_own_place_for_torchs_cache_stays(tmp_path: Path) -> None:
    own = str(tmp_path / "own")
    assert compiled_in(STARTS["spawn"], tmp_path, {torch_caches.VARIABLE: own}) == [own]
    assert not (tmp_path / ".cache" / "labkit").exists()


def test_h2_the_place_is_the_same_each_time(tmp_path: Path) -> None:
    first = torch_caches.folder({"XDG_CACHE_HOME": str(tmp_path)})
    assert torch_caches.folder({"XDG_CACHE_HOME": str(tmp_path)}) == first
    assert torch_caches.private({torch_caches.VARIABLE: "/mine"}) == {torch_caches.VARIABLE: "/mine"}


@as_root
@pytest.mark.parametrize("kind", ["another user's", "open", "a link", "below another user's", "below an open one"])
def test_h2_a_place_that_others_can_change_is_not_used(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "cache"
    (base / "labkit").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    if kind == "another user's":
        os.chown(base / "labkit", 65534, 65534)
    elif kind == "open":
        (base / "labkit").chmod(0o777)
    elif kind == "a link":
        (base / "labkit").rmdir()
        (base / "labkit").symlink_to(tmp_path / "elsewhere")
    elif kind == "below another user's":
        os.chown(base, 65534, 65534)
    else:
        base.chmod(0o777)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(temporary))
    environ = {"XDG_CACHE_HOME": str(base)}
    assert torch_caches.folder(environ) == str(temporary / "labkit-0" / "torchinductor")
    assert os.listdir(tmp_path / "elsewhere") == []
    # A neighbour may take that name too.
    (temporary / "labkit-0" / "torchinductor").rmdir()
    (temporary / "labkit-0").rmdir()
    (temporary / "labkit-0").mkdir()
    os.chown(temporary / "labkit-0", 65534, 65534)
    torch_caches._passing.cache_clear()
    passing = torch_caches.folder(environ)
    assert Path(passing).stat().st_mode & 0o777 == 0o700
    assert torch_caches.folder(environ) == passing
    torch_caches._passing.cache_clear()

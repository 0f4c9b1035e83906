"""A folder with a neighbour's module of every name does not affect ranks whose agent was started in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TESTS
from tests.process.shadows import plant

CELLS = (
    "x = 1", "print(x)", "x?", "len??", "%who", "%timeit -n 1 -r 1 x", "!true",
    "import pdb, json", "__import__('warnings').warn('w')",
    "get_ipython().complete('x.re')", "get_ipython().complete('import js')", "get_ipython().Completer.complete('x.im')",
    "def f():\n    return g()\ndef g():\n    raise ValueError",
    "import asyncio\nawait asyncio.sleep(0)", "import helper\nhelper.value",
)  # fmt: skip
WRONG = ("g()", "1 +", "%no_such_magic", "import no_such_module")
POOL = f"""
import os, sys
import labkit
{{how}}
if __name__ == "__main__":
    with labkit.WorkerPool(1, device="cpu") as pool:  # imports what the notebook's own process needs
        for cell in ("1", "1 / 0"):
            try:
                pool.run_cell(cell)
            except labkit.RankFailedError:
                pass
    os.chdir(sys.argv[1])
    {{path}}
    with labkit.WorkerPool(1, device="cpu"{{options}}) as pool:
        for cell in {CELLS!r}:
            pool.run_cell(cell)
        for wrong in {WRONG!r}:
            try:
                pool.run_cell(wrong)
            except Exception as error:
                print(type(error).__name__)
        print(pool.run(lambda: 1).same())
"""
# As in a kernel, whose import path has the folder after the standard library.
KERNEL = "sys.path[:] = __import__('labkit.base.own_python').base.own_python.with_folder(sys.path, '')"
STARTS = {
    "agents": POOL.format(how="", path="", options=", launcher='agents'"),
    "fork server": POOL.format(how="", path=KERNEL, options=""),
    "spawn": POOL.format(how="os.environ['LABKIT_START'] = 'spawn'", path=KERNEL, options=""),
}


@pytest.mark.parametrize("program", STARTS.values(), ids=STARTS)
def test_h3_a_folder_with_a_module_of_every_name_changes_nothing_on_the_ranks(program: str, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    plant(folder, tmp_path / "ran")
    (folder / "helper.py").write_text("value = 1")
    script = tmp_path / "program.py"
    script.write_text(program)
    environ = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run([sys.executable, script, folder], env=environ, capture_output=True, text=True, check=False, timeout=100)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "1"

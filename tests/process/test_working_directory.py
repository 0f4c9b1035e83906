"""Files in the working directory neither run in labkit's own processes nor keep them from starting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PATH = "import os, sys\nprint([entry for entry in sys.path if entry and not os.path.isabs(entry)])"
POOLS = """
import labkit, time
from labkit.controller.start.launchers import fork_server
pids = set()
for _ in range(2):
    with labkit.WorkerPool(2, "cpu", start_timeout_s=60) as pool:
        assert pool.run(lambda: 1).same() == 1
    pids.add(fork_server.shared().pid)
    time.sleep(4)  # the fork server imports matplotlib while it has nothing to do
assert len(pids) == 1, pids
print("two pools")
"""


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=110, check=False)


def test_h5_an_installed_labkit_puts_no_relative_entry_on_the_import_path(tmp_path: Path) -> None:
    assert python(PATH, tmp_path).stdout == "[]\n"


@pytest.mark.parametrize("what", ["a fifo", "no text"])
def test_h5_a_matplotlibrc_in_the_working_directory_holds_and_ends_no_fork_server(tmp_path: Path, what: str) -> None:
    rc = tmp_path / "matplotlibrc"
    if what == "a fifo":
        os.mkfifo(rc)
    else:
        rc.write_bytes(b"\xff\xfe\n")
    done = python(POOLS, tmp_path)
    assert done.stdout == "two pools\n", done.stderr[-2000:]

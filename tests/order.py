"""The groups of tests that belong together, and the order in which the groups start."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
NOTEBOOKS = frozenset(path.stem for path in (TESTS.parent / "notebooks").glob("*.ipynb"))
# Cheap tests first: they fail in seconds.
FOLDERS = ("unit", "process", "multihost", "notebooks", "browser", "gpu")
BROWSER = "tests/browser/"
# The groups that take longest, before all others that need more than one process: one that starts late runs alone at the end, while
# the other processes of the tests have nothing to do.
LONG = (
    "tests/notebooks/test_runner.py",
    "tests/process/test_pool_agents.py",
    "00_start_here",
    "02_activation_offload",
    "07_two_machines",
    "tests/notebooks/test_lab04_exercises.py",
    "tests/process/test_own_python.py",
    "03_fsdp1_to_fsdp2",
    "04_fsdp_runtime",
    "05_2d_state_dicts",
    "tests/multihost/test_lost_notebook.py",
    "tests/multihost/test_attached_pool.py",
    "01_composable_checkpointing",
    "tests/process/test_s4_2d.py",
    "tests/process/test_interrupt_training.py",
    "tests/process/test_torchrun_script.py",
    "06_checkpoint_forensics",
    BROWSER,
    "tests/process/test_progress.py",
    "tests/multihost/test_trust_ports.py",
    "tests/process/test_checkpoint_faults.py",
    "tests/process/test_load_memory.py",
    "tests/process/test_s3_runtime.py",
    "tests/notebooks/test_hostile_handouts.py",
    "tests/process/test_upstream.py",
    "tests/process/test_stop_verdicts.py",
)


def group_of(nodeid: str) -> str:
    """A test's group: its notebook if it has one, the browser (those tests share JupyterLab), or its file."""
    file, _, name = nodeid.partition("::")
    parameter = re.search(r"\[(\w+)", name)
    if parameter and parameter[1] in NOTEBOOKS:
        return parameter[1]
    return BROWSER if file.startswith(BROWSER) else file


def place_of(nodeid: str) -> tuple[int, int, int]:
    """The key to sort tests by: the cheap folder, the long groups, then the others, each in the order of folders."""
    folder = nodeid.removeprefix("tests/").partition("/")[0]
    number = FOLDERS.index(folder) if folder in FOLDERS else -1
    group = group_of(nodeid)
    if number > 0 and group in LONG:
        return 1, LONG.index(group), number
    return (0 if number <= 0 else 2), 0, number

"""A script under torchrun: rank 0 acts as the notebook's own process, the other ranks answer, errors end it everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labkit.course.script import write_script
from tests.matrix import matrix
from tests.notebooks.script_output import of_script, run_script

Script = Callable[..., Path]
SETUP = "import labkit\n\npool = labkit.WorkerPool(world_size, replace=True)"


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write named cells as a notebook, and the notebook as a script; the first cell holds the parameters."""

    def write(**cells: str) -> Path:
        code = [new_code_cell("world_size = 4  # ranks", metadata={"tags": ["parameters"]}, id="parameters")]
        code += [new_code_cell(source, id=name) for name, source in {"setup": SETUP, **cells}.items()]
        nbformat.write(new_notebook(cells=code), tmp_path / "09_small.ipynb")
        path = tmp_path / "script.py"
        path.write_text(write_script(tmp_path / "09_small.ipynb"))
        return path

    return write


def test_values_travel_between_the_notebook_s_own_process_and_the_ranks_as_with_a_pool(script: Script, tmp_path: Path) -> None:
    path = script(
        x="%%spmd\nx = 10 * rank\nworld_size",
        kernel_x="x = 'mine'\nworld_size, pool.world_size, pool.device",
        pull="pool.pull('x')",
        define="def plus(amount):\n    return y + amount\n\ny_of_kernel = 1",
        push="pool.push(y=5)\npool.push(y=7, ranks=[1])\npool.run(plus, 0.5)",
        some="%%spmd --ranks 1 --out z\nx + y",
        kept="z, x",
        run_some="pool.run(len, 'abc', ranks=0)",
        device="%%spmd\nimport torch\ntorch.ones(1, device=device).sum() * rank",
        silent="%%spmd\nNone",
    )
    returncode, stdout, errors = run_script(path, tmp_path)
    assert returncode == 0, errors
    shown = of_script(stdout)
    assert shown["x"] == ["ranks 0-1: 2"]
    assert shown["kernel_x"] == ["(2, 2, 'cpu')"]
    assert shown["pull"] == ["rank 0: 0", "rank 1: 10"]
    assert shown["push"] == ["rank 0: 5.5", "rank 1: 7.5"]
    assert shown["some"] == []
    assert shown["kept"] == ["(rank 1: 17, 'mine')"]
    assert shown["run_some"] == ["rank 0: 3"]
    assert shown["device"] == ["rank 0: tensor(0.)", "rank 1: tensor(1.)"]
    assert shown["silent"] == []


def test_another_pool_has_fewer_ranks_and_none_of_the_old_names_and_a_restart_forgets_too(script: Script, tmp_path: Path) -> None:
    total = "import torch\nimport torch.distributed as dist\ntotal = torch.ones(1)\ndist.all_reduce(total)"
    look = f'%%spmd\nknown = "x" in globals()\n{total}\nx = 1\nknown, rank, world_size, total.item()'
    path = script(
        first=look,
        again=look,
        restart="pool.restart()",
        restarted=look,
        fewer="pool = labkit.WorkerPool(2, replace=True)",
        with_fewer=look,
        number="pool.world_size, world_size",
    )
    returncode, stdout, errors = run_script(path, tmp_path, world_size=3)
    assert returncode == 0, errors
    shown = of_script(stdout)
    assert shown["first"] == [f"rank {rank}: (False, {rank}, 3, 3.0)" for rank in range(3)]
    assert shown["again"] == [f"rank {rank}: (True, {rank}, 3, 3.0)" for rank in range(3)]
    assert shown["restarted"] == shown["first"]
    assert shown["with_fewer"] == [f"rank {rank}: (False, {rank}, 2, 2.0)" for rank in range(2)]
    assert shown["number"] == ["(2, 3)"]


@pytest.mark.parametrize(
    ("cell", "said"),
    matrix(
        ("pool.run(lambda: 1 / (1 - rank))", "ZeroDivisionError"),
        ("1 / 0", "<cell broken>"),
    ),
)
def test_an_error_ends_the_script_on_every_rank_with_its_cause(script: Script, tmp_path: Path, cell: str, said: str) -> None:
    returncode, stdout, errors = run_script(script(broken=cell, after="print('never')"), tmp_path)
    assert returncode != 0
    assert said in errors
    assert "never" not in stdout

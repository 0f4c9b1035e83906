"""The ``labkit`` command's arguments: reading, refusals and decisions before any kernel starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import nbformat
import pytest
from click.testing import CliRunner, Result

from labkit.base import machine
from labkit.cli import ELSEWHERE, main, parse_value
from labkit.course.parameters import UnknownParameterError
from labkit.course.running import runner
from labkit.course.running.runner import run_notebooks
from tests.conftest import MakeNotebook


def _labkit(*arguments: object) -> Result:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_an_unknown_parameter_runs_nothing_and_lists_the_known_ones(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    result = _labkit("run", make_notebook("good", "1"), "--out", "out", "-p", "sizes", "2")
    assert result.exit_code == 2
    assert "has no parameter 'sizes'. Did you mean 'size'? It knows: size, label." in result.output
    assert not (tmp_path / "out").exists()


def test_a_parameter_that_is_given_twice_is_refused(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    result = _labkit("run", make_notebook("good", "1"), "--out", "out", "-p", "size", "2", "-p", "size", "3")
    assert result.exit_code == 2
    assert "-p size is given 2 times" in result.output
    assert not (tmp_path / "out").exists()


def test_a_parameter_for_a_notebook_without_parameters_is_an_error(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    notebook = make_notebook("bare", "1")
    content = nbformat.read(notebook, as_version=4)
    del content.cells[0]
    nbformat.write(content, notebook)
    with pytest.raises(UnknownParameterError, match="no cell tagged 'parameters'"):
        run_notebooks([notebook], tmp_path / "out", parameters={"size": 1})


def test_writing_over_the_notebooks_themselves_is_refused(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    notebook = make_notebook("good", "1")
    before = notebook.read_bytes()
    result = _labkit("run", notebook, "--out", tmp_path)
    assert result.exit_code == 2
    assert "would overwrite it" in result.output
    assert notebook.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("0.5", 0.5),
        ("True", True),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ("cpu", "cpu"),
        ("two words", "two words"),
        ("", ""),
    ],
)
def test_parameters_are_literals_or_text(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("gpus", "cores", "memory_gib", "jobs"),
    [(0, 2, 16, 1), (0, 8, 64, 4), (0, 64, 7, 2), (0, 1, 1, 1), (8, 64, 500, 1)],
    ids=["laptop", "workstation", "little memory", "tiny", "GPUs are shared"],
)
def test_the_number_of_jobs_follows_the_machine(
    gpus: int, cores: int, memory_gib: int, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = machine.Gpu(0, "GPU", 80 * 2**30, 80 * 2**30, "580")
    monkeypatch.setattr(machine, "nvidia_gpus", lambda: [gpu] * gpus)
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: memory_gib * 2**30)
    assert runner.default_jobs() == jobs


def test_the_command_without_the_lab_extra_says_how_to_get_it(make_notebook: MakeNotebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "papermill", None)
    for name in ("execution", "runner", "summary", "progress"):
        monkeypatch.delitem(sys.modules, f"labkit.course.running.{name}", raising=False)
    result = _labkit("run", make_notebook("good", "1"))
    assert result.exit_code == 1
    assert "pip install 'torch-labkit[lab]'" in result.output
    assert os.listdir() == ["good.ipynb"]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_command_that_lives_elsewhere_is_listed_with_its_own_words(name: str) -> None:
    context = click.Context(main)
    command = main.get_command(context, name)
    assert isinstance(command, click.Command)
    assert command.help.startswith(ELSEWHERE[name][1])
    assert _labkit(name, "--help").exit_code == 0


def test_the_list_of_commands_imports_none_of_them() -> None:
    program = """
        import sys
        from labkit.cli import main
        try:
            main(["--help"])
        finally:
            print([name for name in ("torch", "papermill") if name in sys.modules])
    """
    shown = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("[]\n")
    assert all(re.search(rf"^  {name} ", shown, flags=re.MULTILINE) for name in ("run", "doctor", *ELSEWHERE))

"""The commands ``labkit lab`` and ``labkit progress``."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

import click
import nbformat

from labkit.base.plain_text import printable
from labkit.course.files import is_sealed, is_written, replace_file, sealed, shown
from labkit.course.learner.copies import SOLVED, Copy, chosen, is_checkout, student_labs, write_copies
from labkit.course.learner.solved import progress as progress_of
from labkit.errors import LabkitError

START = "start.ipynb"
#: Put kernels on Unix sockets in your own folder: every user of the machine can read output from Jupyter's default TCP ports.
PRIVATE = "--KernelManager.transport=ipc"
_START_WRITER = "labkit lab, start page"
_WELCOME = """# The labs

These copies are yours: write into them. `labkit lab` never writes over a copy that you have changed or run.

Run the cell below (Shift+Enter) to bring its last column up to date; it reads the copies as they are saved."""
_CELL = "from labkit.course.learner import progress\n\nprogress()"
_SAID = {
    "renewed": "{path} is the newer lab; nobody had changed the old one",
    "beside": "{path} is the newer lab, beside your own copy",
    "apart": "{path} is the lab: the file that has its name is not a copy that labkit can read",
}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("labs", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--into", type=click.Path(file_okay=False, path_type=Path), default=Path("work"), show_default=True, help="Your folder."
)
@click.option("--solved", is_flag=True, help="Open the labs with their solutions instead (in a checkout of the repository).")
@click.option("--no-open", is_flag=True, help="Write the copies, and open nothing.")
def lab(labs: tuple[str, ...], into: Path, solved: bool, no_open: bool) -> None:
    """Write unsolved copies of the labs into your folder, and open JupyterLab there.

    LABS are beginnings of names, such as 03; by default all labs. A copy that you have changed or run is never overwritten: if
    the lab has changed since, the newer one is written beside it, and the command says so. Options that are not listed here, and
    everything after them, go to JupyterLab, such as --no-browser or --port 8889.
    """
    names = tuple(itertools.takewhile(lambda text: not text.startswith("-"), labs))
    options = labs[len(names) :]  # JupyterLab's options, whose values may look like names
    try:
        if solved:
            if no_open:
                raise click.UsageError("--solved opens the labs as they are, and --no-open opens nothing: choose one.")
            if not is_checkout():
                raise click.ClickException("solutions are in labkit's repository only, not in what is installed.")
            first = f"/{next(iter(chosen(student_labs(), names)))}.ipynb" if names else ""
            _open(SOLVED.parent, f"notebooks{first}", options)
        found = chosen(student_labs(), names)
        copies = write_copies(found, into)
        _write_start(into)
    except LabkitError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{shown(error.filename or into)} cannot be written: {error.strerror}") from None
    _tell(copies, into)
    if not no_open:
        _open(into, copies[0].path.name if len(copies) == 1 else START, options)


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=Path("work"))
def progress(folder: Path) -> None:
    """List the solved exercises in FOLDER, which holds your saved copies of the labs.

    An exercise is solved, tried (its check refused the last answer) or open (there is no answer yet). FOLDER is work by default.
    """
    try:
        click.echo(printable(repr(progress_of(folder)), keep="\n"))
    except LabkitError as error:
        raise click.ClickException(str(error)) from None


def _tell(copies: list[Copy], into: Path) -> None:
    made = sum(copy.state == "made" for copy in copies)
    kept = sum(copy.state == "kept" for copy in copies)
    parts = [f"{number} {word}" for number, word in ((made, "new labs"), (kept, "labs as you left them")) if number]
    if parts:
        click.echo(f"{shown(into)}: {', '.join(parts)}")
    for copy in copies:
        if copy.state in _SAID:
            click.echo(_SAID[copy.state].format(path=shown(copy.path)))


def _write_start(folder: Path) -> None:
    """Write the start page, with the current table as its cell's output, unless the learner has changed it."""
    path = folder / START
    if os.path.lexists(path) and not is_written(path, _is_start):
        return
    table = progress_of(folder)
    cell = nbformat.v4.new_code_cell(_CELL, id="progress")
    data = {"text/markdown": table._repr_markdown_(), "text/plain": repr(table)}
    cell.outputs = [nbformat.v4.new_output("display_data", data)]
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(_WELCOME, id="welcome"), cell])
    page.metadata["kernelspec"] = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    replace_file(path, sealed(page, _START_WRITER), _is_start, within=folder, make=True)


def _is_start(file: BinaryIO) -> bool:
    return is_sealed(file, _START_WRITER)


def _open(folder: Path, first: str, options: Sequence[str]) -> NoReturn:
    """Replace this process with JupyterLab in a folder."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise click.ClickException("opening the labs needs JupyterLab: pip install 'torch-labkit[lab]'")
    flags = [
        PRIVATE,
        f"--ServerApp.root_dir={folder.resolve()}",
        f"--LabApp.default_url=/lab/tree/{first}",
        *(["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),  # JupyterLab refuses root without it
    ]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "jupyterlab", *flags, *options])

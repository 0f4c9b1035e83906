"""The ``labkit`` command."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labkit.base.plain_text import printable
from labkit.base.version import __version__
from labkit.course.light_nbformat import import_nbformat
from labkit.errors import LabkitError

if TYPE_CHECKING:
    from labkit.course.running.execution import NotebookResult

INTERRUPTED_EXIT_CODE = 130
_ERROR_LINES = 40
# What the shell has opened, as `>(...)` names it, is no file in a folder where somebody else could have put it.
_STREAMS = {"stdout": 1, "stderr": 2}
_STREAM = re.compile(r"/dev/(stdout|stderr)|(?:/dev|/proc/self)/fd/([0-9]{1,9})")


# Commands defined in other modules: where each one is, and the line that `labkit --help` shows without importing it.
ELSEWHERE = {
    "checkpoint": ("labkit.checkpoint.cli:checkpoint", "Look into checkpoints, verify, migrate and reshard them."),
    "plan": ("labkit.plan.cli:plan", "Plan a training job on up to 16,384 ranks: bytes on a rank, traffic of a step, checkpoint."),
    "handouts": ("labkit.course.handouts.cli:handouts", "Make handouts of notebooks, for students and for the instructor."),
    "lab": ("labkit.course.learner.cli:lab", "Write unsolved copies of the labs into your folder, and open JupyterLab there."),
    "progress": (
        "labkit.course.learner.cli:progress",
        "List the solved exercises in FOLDER, which holds your saved copies of the labs.",
    ),
    "new": ("labkit.course.starter:new", "Write NOTEBOOK, a small lab to change into one of your own."),
    "nbgrader": ("labkit.course.handouts.nbgrader:nbgrader", "Write notebooks as assignments of nbgrader."),
}

# Commands that read notebooks.
_OF_NOTEBOOKS = ("run", "script", "handouts", "lab", "progress", "new", "nbgrader")


class LazyGroup(click.Group):
    """A group that imports the commands of :data:`ELSEWHERE` when they are used: some of them import torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all command names, imported or not."""
        return sorted([*super().list_commands(ctx), *ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command. Import it now if another module defines it."""
        if cmd_name in _OF_NOTEBOOKS:
            import_nbformat()
        if cmd_name not in ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = ELSEWHERE[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. If it does not handle an interrupt itself, exit with 130, as the shell expects.

        Error messages may contain file names, so control characters in them are escaped: they must not drive the terminal.
        """
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            vars(error)["message"] = printable(error.message, keep="\n")  # click declares it final
            raise
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED_EXIT_CODE)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands into the help text without importing any of them."""
        own = {name: command.get_short_help_str(limit=80) for name, command in self.commands.items()}
        rows = own | {name: text for name, (_, text) in ELSEWHERE.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="labkit")
def main() -> None:
    """Ranks inside a notebook: a tutorial and lab kit for PyTorch's distributed state."""


@main.command()
@click.argument("notebooks", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-p", "parameters", nargs=2, multiple=True, metavar="NAME VALUE", help="Set a parameter, such as -p world_size 2.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("build/notebooks"), show_default=True)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=600, show_default=True, help="Seconds per notebook."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Notebooks at once. Default: from this machine's cores and memory.")
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Also write a report for CI, one case a notebook.")
def run(
    notebooks: tuple[Path, ...],
    parameters: tuple[tuple[str, str], ...],
    out: Path,
    timeout: float,
    jobs: int | None,
    junit: Path | None,
) -> None:
    """Execute NOTEBOOKS without a browser.

    Writes executed copies and a summary page, index.html, into the folder --out, over those of earlier runs and over nothing
    else. A VALUE is read as a Python literal where it is one, else as text; every notebook has to have a parameter of that name.

    A notebook fails when a cell raises, or ends it early as sys.exit() does. When --timeout has passed it is interrupted, and 5
    seconds later every process that it has started has ended. A cell's output is kept up to 5 million characters, a notebook's
    up to 20 million; a notebook that puts out more does not pass.

    The exit code is 0 when every cell of every notebook ran and all output was kept, 1 when not, 2 when nothing was run because
    a file or a parameter does not exist or something is in the way, 130 after Ctrl-C or SIGTERM.
    """
    try:
        from labkit.course.files import shown
        from labkit.course.running import junit as reports
        from labkit.course.running.progress import ProgressBars
        from labkit.course.running.runner import run_notebooks
        from labkit.course.running.summary import require_place, write_summary
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error}. Running notebooks needs the lab extra: pip install 'torch-labkit[lab]'") from None

    values = _values(parameters)
    # A cancelled CI job sends SIGTERM; kernels must not outlive it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    interrupted = False
    with ProgressBars() as progress:
        try:
            require_place(out, notebooks)
            if junit is not None:
                reports.require_place(junit, notebooks)
            run_notebooks(
                notebooks, out, parameters=values, timeout_s=timeout, jobs=jobs, on_cell=progress.cell, on_result=progress.result
            )
        except KeyboardInterrupt:
            interrupted = True
        except LabkitError as error:
            raise click.UsageError(str(error)) from None
        except OSError as error:
            raise click.ClickException(f"{error.filename or out}: {error.strerror}") from None
    results = sorted(progress.results, key=lambda result: notebooks.index(result.notebook))
    _report(results)
    passed = sum(result.passed for result in results)
    try:
        summary = write_summary(results, out, values)
        if junit is not None:
            reports.write_report(results, junit)
    except LabkitError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{shown(error.filename or out)} cannot be written: {error.strerror}") from None
    click.echo(f"{passed} of {len(results)} notebooks passed. Summary: {shown(summary)}")
    sys.exit(INTERRUPTED_EXIT_CODE if interrupted else int(passed < len(results)))


@main.command()
@click.argument("notebook", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="The file to write; standard output when left out."
)
@click.option("-p", "parameters", nargs=2, multiple=True, metavar="NAME VALUE", help="Set a parameter, such as -p batch_size 8.")
def script(notebook: Path, out: Path | None, parameters: tuple[tuple[str, str], ...]) -> None:
    """Write NOTEBOOK as one script for torchrun.

    --out may name a script that this command wrote before; no other file is written over. Of what is no file it may name what the
    shell has opened: /dev/stdout, /dev/stderr, /dev/fd/N.

    The %%spmd cells become plain code; what the notebook's own process does is played by rank 0. Cells that teach a failure
    are left out, with a comment. How many ranks there are is torchrun's --nproc-per-node.
    """
    try:
        from labkit.course.files import refuse_foreign, replace_file, shown
        from labkit.course.script import is_script, write_script
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error}. Reading notebooks needs the lab extra: pip install 'torch-labkit[lab]'") from None

    try:
        text = write_script(notebook, _values(parameters))
        if out is None:
            click.echo(text, nl=False)
            return
        if found := _STREAM.fullmatch(str(out)):
            with open(os.dup(_STREAMS.get(found[1]) or int(found[2])), "w", encoding="utf-8") as file:
                file.write(text)
            return
        refuse_foreign(out, [notebook], is_script)
        replace_file(out, text, is_script)
    except LabkitError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{shown(out or 'the output')} cannot be written: {error.strerror}") from None
    click.echo(f"Written. Run it with: torchrun --nproc-per-node 4 {shlex.quote(shown(out))}")


def _values(parameters: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    names = [name for name, _ in parameters]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise click.UsageError(f"-p {twice[0]} is given {names.count(twice[0])} times")
    return {name: parse_value(text) for name, text in parameters}


def parse_value(text: str) -> Any:
    """Read a parameter's value from the command line: a Python literal (``2``, ``0.5``, ``True``, ``[1, 2]``) or text.

    Raises:
        UsageError: The text is a literal that cannot be evaluated, such as a dict whose key is a list.
    """
    try:
        return ast.literal_eval(text)
    except (TypeError, RecursionError, MemoryError) as error:
        raise click.UsageError(f"-p: {text[:80]!a} is no value: {str(error) or 'it is nested too deeply'}") from None
    except (ValueError, SyntaxError):
        return text


def _report(results: list[NotebookResult]) -> None:
    from labkit.course.files import shown

    for result in results:
        if result.error:
            # The first line names the cell; the reason of an error is at its end.
            first, *lines = result.error.splitlines()
            cut = [f"... {len(lines) - _ERROR_LINES} lines, all in the executed copy"] if len(lines) > _ERROR_LINES else []
            copy = f"-> {shown(result.executed)}\n" if result.executed.exists() else ""
            click.echo("\n".join([f"\n{shown(result.notebook)}: {result.status}", first, *cut, *lines[-_ERROR_LINES:], copy]))


@main.command()
@click.argument("scheduler", type=click.Choice(["shell", "slurm", "kubernetes"]))
@click.option("--num-nodes", type=click.IntRange(min=1), required=True, help="How many machines.")
@click.option("--workers-per-node", type=click.IntRange(min=1), required=True, help="Ranks on each.")
@click.option("--connect", required=True, metavar="tcp://HOST:PORT", help="The notebook, as WorkerPool.attach() shows it.")
@click.option("--key-file", default="/etc/labkit/labkit.key", show_default=True, help="The key file's path on the machines.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="What each rank gets there.")
@click.option("--linger", type=float, help="Seconds that ranks wait for a notebook that has gone.")
@click.option("--image", default="YOUR_IMAGE", show_default=True, help="For Kubernetes: an image with torch and labkit.")
def launch(
    scheduler: str,
    num_nodes: int,
    workers_per_node: int,
    connect: str,
    key_file: str,
    device: str,
    linger: float | None,
    image: str,
) -> None:
    """Write what starts the ranks of an attached pool.

    For SCHEDULER shell, the command to run on each machine, by ssh for example; for slurm, a script for sbatch; for kubernetes,
    a manifest for kubectl apply. In the notebook: labkit.WorkerPool.attach(num_nodes, workers_per_node, ...).
    """
    from labkit.controller.machines.launch_text import Launch
    from labkit.controller.start.pool_plan import is_endpoint

    if not connect.startswith("tcp://") or not is_endpoint(connect.removeprefix("tcp://")):
        raise click.BadParameter(f"{connect!r} is no address: write tcp://HOST:PORT", param_hint="--connect")
    if scheduler == "kubernetes" and key_file.count("/") < 2:
        raise click.BadParameter(f"{key_file!r}: write where the pods find it, in a folder of its own", param_hint="--key-file")
    if linger is not None and not 0 < linger < math.inf:
        raise click.BadParameter("write a positive number of seconds", param_hint="--linger")
    found = Launch(num_nodes, workers_per_node, connect, key_file, linger, on_gpus=device == "cuda")
    if scheduler == "shell":
        text = found.command()
    else:
        text = found.slurm() if scheduler == "slurm" else found.kubernetes(image)
    click.echo(text.rstrip("\n"))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def doctor(as_json: bool) -> None:
    """Say what this machine can run, and what to do about what it cannot.

    The exit code is 1 only when labkit cannot run here at all.
    """
    from labkit.doctor import examine, render

    findings = examine()
    usable = not any(finding.fatal for finding in findings)
    if as_json:
        click.echo(json.dumps({"usable": usable, "findings": [finding.as_dict() for finding in findings]}, indent=2))
    else:
        render(findings)
    sys.exit(0 if usable else 1)

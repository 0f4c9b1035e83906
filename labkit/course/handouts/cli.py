"""``labkit handouts``."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from labkit.base import machine
from labkit.base.plain_text import printable
from labkit.errors import LabkitError

NOTEBOOKS = "notebooks/*.ipynb"


@click.command()
@click.argument("notebooks", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("build/handouts"), show_default=True)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=600, show_default=True, help="Seconds per notebook to be run."
)
def handouts(notebooks: tuple[Path, ...], out: Path, timeout: float) -> None:
    """Make handouts of notebooks, for students and for the instructor.

    NOTEBOOKS are those in notebooks/ when none is named. Makes a set for students in OUT/student (solutions are holes, predictions
    are open) and one in OUT/instructor (solutions, outputs, notes), each as notebooks, HTML pages that open offline, PDFs for
    printing, an index page, and a zip beside the two folders. Notebooks that have not been run are run first; their executed
    copies, with solutions, go to OUT/instructor/executed. One of which some cells have been run is refused. PDFs need Chromium.

    Students get a hole in place of the code between "### BEGIN SOLUTION" and "### END SOLUTION". Cells tagged "instructor" or
    "solution" are in the instructor's set only.

    A second call with other notebooks adds them to the set in OUT; a notebook of the same name replaces its handouts. Files that no
    call wrote, or that have been changed since (OUT/handouts.json lists them), are never replaced: the command names them and
    stops. It also stops if the list, OUT/student or OUT/instructor is a link or another user's. OUT stays as it was until
    everything is built.

    The exit code is 0 if everything was made, 1 if not, 130 after Ctrl-C.
    """
    try:
        from labkit.course.handouts.build import make_handouts
        from labkit.course.running.progress import ProgressBars
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error}. Handouts need the lab extra: pip install 'torch-labkit[lab]'") from None

    chosen = list(notebooks) or sorted(Path().glob(NOTEBOOKS))
    if not chosen:
        raise click.UsageError(f"there is no {NOTEBOOKS} here. Name the notebooks.")
    # Cancelling a CI job sends SIGTERM, which kernels must not outlive.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chromium = machine.find_chromium()
    try:
        with ProgressBars() as progress:
            made = make_handouts(
                chosen,
                out,
                timeout_s=timeout,
                chromium=chromium,
                on_page=lambda stem, audience: click.echo(f"{audience}: {printable(stem)} ...", err=True),
                on_cell=progress.cell,
                on_result=progress.result,
            )
    except (LabkitError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or out}: {error.strerror}. {out} is unchanged.") from None
    except KeyboardInterrupt:
        click.echo(f"No handouts were made. {printable(str(out))} is unchanged.", err=True)
        raise
    for path in made.files:
        click.echo(f"made {printable(str(path))}")
    if made.others:
        click.echo(f"kept, from earlier calls: {printable(', '.join(made.others))}")
    if chromium is None:
        click.echo("No PDFs: they need Chromium (on Debian: apt-get install chromium).", err=True)
    for audience, folder in made.folders.items():
        click.echo(printable(f"{audience}: {folder / 'index.html'}, {made.zips[audience]}"))

"""The starter notebook for a lab of your own: ``labkit new``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from labkit.base import places
from labkit.base.places import PlaceError
from labkit.base.plain_text import printable

STARTER = Path(__file__).with_name("starter.ipynb")
_TITLE = "Title of the lab"
_GUIDE = Path(__file__).with_name("README.md")


@click.command()
@click.argument("notebook", type=click.Path(dir_okay=False, path_type=Path))
def new(notebook: Path) -> None:
    """Write NOTEBOOK, a small lab to change into one of your own.

    It is complete, with a prediction, an exercise, its solution and its check: run, script, handouts and nbgrader accept it as it
    is. An existing file is not replaced.
    """
    if notebook.suffix != ".ipynb":
        raise click.ClickException(f"the name {notebook} has to end in .ipynb")
    title = notebook.stem.replace("_", " ")
    heading = json.dumps(title[:1].upper() + title[1:])[1:-1]
    text = STARTER.read_text(encoding="utf-8").replace(_TITLE, heading, 1)
    try:
        with places.opened(notebook.parent, make=True) as fd:
            places.write_new(notebook.name, text.encode(), fd)
    except PlaceError as error:
        raise click.ClickException(str(error)) from None
    except FileExistsError:
        raise click.ClickException(f"{notebook} exists already. Choose another name.") from None
    except OSError as error:
        raise click.ClickException(f"{notebook} cannot be written: {error.strerror}") from None
    name = printable(str(notebook))
    click.echo(f"made {name}. Run it with: labkit run {shlex.quote(name)}. How to write a lab: {_GUIDE}")

"""Output of the ``labkit checkpoint`` commands."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from labkit.base.plain_text import printable
from labkit.errors import CheckpointError

if TYPE_CHECKING:
    from labkit.checkpoint.checks.findings import Report
    from labkit.checkpoint.convert.engine import Result

INTERRUPTED_EXIT_CODE = 130


@contextmanager
def errors_told() -> Iterator[None]:
    """Report an error about files or arguments as one message, and end the command."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the output has gone; click ends quietly
    except CheckpointError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        raise click.ClickException(printable(f"{place}{error.strerror or error}")) from None
    except MemoryError:
        raise click.ClickException("there is not enough memory for it") from None


def _say(text: str, *, err: bool = False) -> None:
    """Print a line that may contain names from files."""
    click.echo(printable(text), err=err)


def write_json(content: object) -> None:
    """Print JSON."""
    json.dump(content, sys.stdout, indent=1, default=str)
    sys.stdout.write("\n")


def run_and_tell(work: Callable[[], Result]) -> None:
    """Run a migration or a reshard, and print what it wrote. Exit with 130 if interrupted."""
    from labkit.checkpoint.wording import bytes_text, counted

    # A scheduler's SIGTERM ends the work like Ctrl-C, with the usual cleanup.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with errors_told():
            result = work()
    except KeyboardInterrupt as interrupt:
        _say(" ".join(["Interrupted.", *getattr(interrupt, "__notes__", ())]), err=True)
        sys.exit(INTERRUPTED_EXIT_CODE)
    finally:
        signal.signal(signal.SIGTERM, before)
    for note in result.notes:
        _say(f"note: {note}")
    codes = ", ".join(sorted({finding.code for finding in result.accepted}))
    despite = f", despite {counted(len(result.accepted), 'finding')} that you accepted ({codes})" if codes else ""
    _say(
        f"{result.path}: {counted(result.num_tensors, 'tensor')}, {bytes_text(result.size_bytes)}, in "
        f"{counted(result.num_files, 'file')}, verified{despite}"
    )


def print_report(report: Report) -> None:
    """Print what ``verify`` found: one line per finding, then the verdict."""
    from labkit.checkpoint.wording import counted

    for finding in report.findings:
        click.echo(finding.line())
    for text in report.unchecked:
        _say(f"not checked: {text}")
    looked = ", ".join(f"{number:,} {name.removesuffix('s') if number == 1 else name}" for name, number in report.checked.items())
    errors = sum(finding.severity == "error" for finding in report.findings)
    verdict = "ok" if report.ok else counted(errors, "error")
    _say(f"{report.path}: {verdict}" + (f" ({looked})" if looked else ""))

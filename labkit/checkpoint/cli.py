"""``labkit checkpoint``: the checkpoint tools on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from labkit.checkpoint.catalog import open_checkpoint
from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.findings import Report
from labkit.checkpoint.model import Checkpoint
from labkit.checkpoint.progress import ByteProgress
from labkit.checkpoint.safe_pickle import Unknown
from labkit.checkpoint.show import DEFAULT_ROWS, describe, printable, render

PATH = click.Path(path_type=Path)


@click.group()
def checkpoint() -> None:
    """Look into checkpoints, verify, migrate and reshard them. Needs no GPU, no ranks, and runs nothing from a file."""


def open_or_fail(path: Path, unknown: Unknown = "refuse") -> Checkpoint:
    """Open a checkpoint for a command; its errors become the command's."""
    try:
        return open_checkpoint(path, unknown=unknown)
    except CheckpointError as error:
        raise click.ClickException(str(error)) from None


@checkpoint.command("show")
@click.argument("path", type=PATH)
@click.argument("patterns", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Write JSON instead of a table.")
@click.option("--chunks", is_flag=True, help="List each shard: its rows, file, byte and writing rank.")
@click.option("--all", "all_rows", is_flag=True, help=f"List all tensors, not the first {DEFAULT_ROWS}.")
@click.option("--opaque", is_flag=True, help="Go on past names outside the allow-list. They are listed, not run.")
def show_command(path: Path, patterns: tuple[str, ...], as_json: bool, chunks: bool, all_rows: bool, opaque: bool) -> None:
    """Show what is in the checkpoint at PATH: a DCP directory, a torch.save file or folder, safetensors, or a store.

    PATTERNS such as 'model.layers.0.*' choose tensors.
    """
    found = open_or_fail(path, "opaque" if opaque else "refuse")
    if as_json:
        json.dump(describe(found, patterns=patterns, chunks=chunks), sys.stdout, indent=1, default=str)
        sys.stdout.write("\n")
        return
    console = Console(file=sys.stdout, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200)
    console.print(render(found, patterns=patterns, rows=None if all_rows else DEFAULT_ROWS, chunks=chunks))


@checkpoint.command("verify")
@click.argument("path", type=PATH)
@click.option("--against", type=PATH, help="Another checkpoint, of any kind and sharding, that must hold the same bits.")
@click.option("--model", help="MODULE:FUNCTION that builds the model to compare names and shapes with. It is imported and run.")
@click.option("--finite", is_flag=True, help="Also look for NaN and inf.")
@click.option("--quick", is_flag=True, help="Look at the indices only and read no data.")
@click.option("--strict", is_flag=True, help="Warnings fail too.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Threads that read.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def verify_command(
    path: Path, against: Path | None, model: str | None, finite: bool, quick: bool, strict: bool, workers: int, as_json: bool
) -> None:
    """Verify the checkpoint at PATH: complete, readable, unchanged, and fit for its model.

    One line a finding: what, where, and what a load would have done silently. The exit code is 0 without errors, 1 with.
    """
    from labkit.checkpoint.verify import verify

    try:
        with ByteProgress("verify", show=not as_json) as progress:
            report = verify(
                path, against=against, model=model, data=not quick, finite=finite, workers=workers, progress=progress.advance
            )
    except CheckpointError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        json.dump(report.as_dict(), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        _print_report(report)
    sys.exit(0 if report.ok and not (strict and report.findings) else 1)


def _print_report(report: Report) -> None:
    for finding in report.findings:
        click.echo(printable(finding.line()).plain)
    for text in report.unchecked:
        click.echo(f"not checked: {text}")
    looked = ", ".join(f"{number:,} {name}" for name, number in report.checked.items())
    errors = sum(finding.severity == "error" for finding in report.findings)
    verdict = "ok" if report.ok else f"{errors} error{'s' if errors != 1 else ''}"
    click.echo(f"{report.path}: {verdict} ({looked})")

"""``labkit checkpoint``: the checkpoint tools on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from labkit.checkpoint.catalog import open_checkpoint
from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.model import Checkpoint
from labkit.checkpoint.safe_pickle import Unknown
from labkit.checkpoint.show import DEFAULT_ROWS, describe, render

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

"""``labkit checkpoint``: the checkpoint tools on the command line."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from labkit.base import torch_caches
from labkit.base.machine import ends_lines
from labkit.base.places import PlaceError
from labkit.checkpoint.checks.findings import CODES
from labkit.checkpoint.cli_output import errors_told, print_report, run_and_tell, write_json

# Commands import what they need when they run, so that help texts appear at once and reading does not import the writers.
if TYPE_CHECKING:
    from labkit.checkpoint.convert.engine import Result
    from labkit.checkpoint.convert.several_optimizers import Order

RARE_COLLECTIONS = (100_000, 20, 20)  # gc.set_threshold
PATH = click.Path(path_type=Path)
TEXT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

MODEL_HELP = "The function, also as MODULE:FUNCTION, builds it without arguments and without weights. It is imported and run."

MIGRATE_HELP = """
\b
Examples:
  labkit checkpoint migrate old/ new --model my_model.py:build    FSDP1 in files of the ranks, to DCP
  labkit checkpoint migrate new new.safetensors --only model --dtype '*=bfloat16'
  labkit checkpoint migrate old.pt new --drop 'scheduler.*' --rename names.txt
  labkit checkpoint migrate 'old/step_100_rank_{rank}.pt' new     Files of ranks among others: where the rank stands
  labkit checkpoint migrate checkpoint-3 new --part =pytorch_model_fsdp_0 --part =optimizer_0 --part scheduler=scheduler.bin

A part that holds a dict of its own, as 'model' is one in pytorch_model_fsdp_0 of accelerate, needs no name before the =. Any other
part does: --part model=model.safetensors.

A pattern of --drop matches names as show lists them. Those of --rename and --dtype match names of parameters in the model, such as
layers.0.weight. A line of the file for --rename is 'old.*.weight -> new.*.weight'; each * stands for the same text on both sides.

An optimizer's own state_dict() has numbers for names. With one parameter group, --model is enough to name them. Several groups,
such as those with and without weight decay, need --order too. Several optimizers need one each: --order g_optimizer=FILE, or, in a
list, --order optimizer.0=FILE. The names are those in the checkpoint's dict of the model, with or without that dict's own (netG.)
in front. Where the old code has made the optimizer, this prints the file, of parameters or of FSDP1's flat parameters:

\b
  names = {id(p): n for n, p in model.named_parameters()}
  print(*(names[id(p)] for g in optimizer.param_groups for p in g["params"]), sep="\\n")
"""

_WIDEST = max(map(len, CODES))
VERIFY_HELP = (
    "An error stops migrate, reshard and load, unless what they leave out has it, or --despite names it. These are the codes:"
    "\n\n\b\n" + "\n".join(f"  {code:{_WIDEST}}  {meaning}" for code, meaning in sorted(CODES.items()))
)

RESHARD_HELP = """
\b
Examples:
  labkit checkpoint reshard old new --ranks 8
  labkit checkpoint reshard old new --mesh dp=4,tp=2 --shard 'tp:*.w1.weight=0' --shard 'tp:*.w2.weight=1'

Axes called dp, fsdp, shard, dp_shard or data shard dim 0 of everything, as fully_shard does. Other axes replicate, but for what
--shard says.
"""


DESPITE = click.option(
    "--despite",
    multiple=True,
    metavar="CODE",
    help="Go on although verify finds errors with this code, such as shared-moments; verify --help lists them. May be repeated.",
)

FOR_TORCH = click.option(
    "--for-torch", metavar="VERSION", help="The torch that is to read the DCP directory, such as 2.13. Default: the one here."
)


@click.group()
@click.pass_context
def checkpoint(context: click.Context) -> None:
    """Look into checkpoints, verify, migrate and reshard them. Needs no GPU, no ranks, and runs nothing from a file."""
    # Objects made per tensor live until the end, so repeated garbage collection would take a third of the time.
    context.call_on_close(functools.partial(gc.set_threshold, *gc.get_threshold()))
    gc.set_threshold(*RARE_COLLECTIONS)


@checkpoint.command("show", short_help="List what is in a checkpoint of any kind.")
@click.argument("path", type=PATH)
@click.argument("patterns", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Write JSON instead of a table.")
@click.option("--chunks", is_flag=True, help="List each shard: its box of the tensor, file, first byte and writing rank.")
@click.option("--all", "all_rows", is_flag=True, help="List every tensor and value, however many.")
@click.option("--opaque", is_flag=True, help="Go on where a pickle asks for code. It is listed, not run.")
def show_command(path: Path, patterns: tuple[str, ...], as_json: bool, chunks: bool, all_rows: bool, opaque: bool) -> None:
    """List what is in the checkpoint at PATH: a DCP directory, a torch.save file or a folder of them, or safetensors.

    A PATH such as 'old/step_100_rank_{rank}.pt' names the files of ranks; * stands for any text. Of a folder of steps that
    labkit.checkpoint.save has written, the latest complete step is taken. PATTERNS such as 'model.layers.0.*' choose tensors and
    values by name.
    """
    with errors_told():
        from rich.console import Console

        from labkit.checkpoint.formats.catalog import open_checkpoint
        from labkit.checkpoint.views.describe import describe
        from labkit.checkpoint.views.table import DEFAULT_ROWS, render

        found = open_checkpoint(path, unknown="opaque" if opaque else "refuse")
        if as_json:
            write_json(describe(found, patterns=patterns, chunks=chunks))
            return
        table = render(found, patterns=patterns, rows=None if all_rows else DEFAULT_ROWS, chunks=chunks)
        # If output goes to a file or pipe, lines do not wrap, so that each name stays on one line.
        width = None if ends_lines(sys.stdout) else 10_000
        console = Console(file=sys.stdout, soft_wrap=width is not None, width=width)
        console.print(table)


def _with_private_caches(context: click.Context, option: click.Parameter, model: str | None) -> str | None:
    """Keep what torch compiles for a model out of the temporary folder, where other users' files could interfere."""
    if model is not None:
        try:
            os.environ.update(torch_caches.private(os.environ))
        except PlaceError as error:
            raise click.ClickException(str(error)) from None
    return model


@checkpoint.command("verify", epilog=VERIFY_HELP, short_help="Find what is missing, damaged or does not fit a model.")
@click.argument("path", type=PATH)
@click.option("--against", type=PATH, help="Another checkpoint, of any kind and sharding, that must hold the same bits.")
@click.option(
    "--model",
    metavar="FILE.py:FUNCTION",
    callback=_with_private_caches,
    help=f"Compare names, shapes and ties with this model. {MODEL_HELP}",
)
@click.option("--finite", is_flag=True, help="Also look for NaN and inf.")
@click.option("--quick", is_flag=True, help="Look at the indices only, and read no tensor.")
@click.option("--strict", is_flag=True, help="Warnings fail too.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Threads that read.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def verify_command(
    path: Path, against: Path | None, model: str | None, finite: bool, quick: bool, strict: bool, workers: int, as_json: bool
) -> None:
    """Verify the checkpoint at PATH: complete, readable, unchanged, and fit for its model.

    One line a finding: where, what is wrong, and what a load would do about it. The exit code is 0 without errors, 1 with; with
    --strict, 1 with warnings too.
    """
    from labkit.checkpoint.checks.verification import verify

    with errors_told():
        report = verify(path, against=against, model=model, data=not quick, finite=finite, workers=workers)
    if as_json:
        write_json(report.as_dict())
    else:
        print_report(report)
    sys.exit(0 if report.ok and not (strict and report.findings) else 1)


@checkpoint.command("migrate", epilog=MIGRATE_HELP, short_help="Turn FSDP1's into FSDP2's, or change the format.")
@click.argument("source", type=PATH)
@click.argument("destination", type=PATH)
@click.option(
    "--to",
    type=click.Choice(["dcp", "safetensors", "torch"]),
    help="A directory that FSDP2 loads, the model alone, or one file. Default: by DESTINATION's suffix, else dcp.",
)
@click.option(
    "--model",
    metavar="FILE.py:FUNCTION",
    callback=_with_private_caches,
    help=f"The model: for FSDP1 LOCAL, numbered optimizer state, tied names. {MODEL_HELP}",
)
@click.option(
    "--order",
    "orders",
    multiple=True,
    metavar="[OPTIMIZER=]FILE",
    help="File with the names of the optimizer's parameters, one a line, in its order; for several parameter groups. Where several "
    "optimizers have numbers, one for each: --order optG=FILE --order optD=FILE.",
)
@click.option(
    "--rename",
    type=TEXT_FILE,
    help="Rename table: 'old.* -> new.*' a line, the first match wins; an empty right side drops the parameter.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    metavar="NAME=PATH",
    help="Put a checkpoint together: read PATH inside SOURCE under NAME, or as it is where NAME is empty. May be repeated.",
)
@click.option("--only", multiple=True, metavar="NAME", help="Keep this top-level key alone, such as model. May be repeated.")
@click.option("--drop", multiple=True, metavar="PATTERN", help="Leave out names such as 'scheduler.*'. May be repeated.")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="PATTERN=DTYPE",
    help="Change the model's dtypes, such as '*=bfloat16'; the first match wins. Overflow is refused.",
)
@click.option(
    "--copies",
    type=click.Choice(["refuse", "first"]),
    default="refuse",
    show_default=True,
    help="Where copies in the ranks' files differ: refuse, or take the first rank's.",
)
@click.option("--shard-bytes", type=click.IntRange(min=1), help="Largest file. Default: 512 MiB for DCP, 5 GB for safetensors.")
@DESPITE
@FOR_TORCH
@click.option("--workers", type=click.IntRange(min=1), default=4, show_default=True, help="Files written at the same time.")
def migrate_command(
    source: Path,
    destination: Path,
    to: Literal["dcp", "safetensors", "torch"] | None,
    model: str | None,
    orders: tuple[str, ...],
    rename: Path | None,
    parts: tuple[str, ...],
    only: tuple[str, ...],
    drop: tuple[str, ...],
    dtypes: tuple[str, ...],
    copies: Literal["refuse", "first"],
    shard_bytes: int | None,
    despite: tuple[str, ...],
    for_torch: str | None,
    workers: int,
) -> None:
    """Turn the checkpoint at SOURCE into one that FSDP2 loads, at DESTINATION: names canonical, optimizer state by name.

    SOURCE is only read. DESTINATION appears complete and verified (verify finds no error in it), or not at all. A run that was
    killed leaves DESTINATION.partial; the same command removes that and starts over.
    """
    from labkit.checkpoint.convert.migration import migrate
    from labkit.checkpoint.convert.rename import read_rules
    from labkit.checkpoint.dtypes import parse_dtypes

    def work() -> Result:
        return migrate(
            source,
            destination,
            to=to,
            model=model,
            order=_read_orders(orders),
            rules=[] if rename is None else read_rules(rename),
            parts=[_parse_part(text) for text in parts],
            only=only,
            drop=drop,
            dtypes=parse_dtypes(dtypes),
            copies=copies,
            shard_bytes=shard_bytes,
            despite=despite,
            for_torch=for_torch,
            workers=workers,
        )

    run_and_tell(work)


@checkpoint.command("reshard", epilog=RESHARD_HELP, short_help="Rewrite the shards for other ranks or another mesh.")
@click.argument("source", type=PATH)
@click.argument("destination", type=PATH)
@click.option("--ranks", type=click.IntRange(min=1), help="Number of ranks that the next job shards over, as fully_shard does.")
@click.option("--mesh", metavar="AXIS=SIZE,...", help="Mesh of the next job, outermost axis first, such as dp=4,tp=2.")
@click.option(
    "--shard",
    "shards",
    multiple=True,
    metavar="AXIS:PATTERN=DIM",
    help="An axis shards this dim of the parameters of these names: 'tp:*.w1.weight=0'. May be repeated.",
)
@DESPITE
@FOR_TORCH
@click.option("--workers", type=click.IntRange(min=1), default=4, show_default=True, help="Files written at the same time.")
def reshard_command(
    source: Path,
    destination: Path,
    ranks: int | None,
    mesh: str | None,
    shards: tuple[str, ...],
    despite: tuple[str, ...],
    for_torch: str | None,
    workers: int,
) -> None:
    """Rewrite SOURCE for another number of ranks or another mesh: what each rank loads is one file, read from end to end.

    SOURCE is only read. DESTINATION is a DCP directory, which appears complete and verified, or not at all. A run that was killed
    leaves DESTINATION.partial; the same command removes that and starts over.
    """
    from labkit.checkpoint.convert.resharding import parse_rule, reshard
    from labkit.spmd.shards.layouts import parse_mesh

    if (ranks is None) == (mesh is None):
        raise click.UsageError("Give either --ranks or --mesh.")
    try:
        axes = parse_mesh(mesh) if mesh is not None else ranks
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    assert axes is not None

    def work() -> Result:
        rules = [parse_rule(text) for text in shards]
        return reshard(source, destination, axes, rules=rules, despite=despite, for_torch=for_torch, workers=workers)

    run_and_tell(work)


def _read_orders(texts: Sequence[str]) -> Order | None:
    """Read files with names: one for the optimizer, or one for each of several, as OPTIMIZER=FILE."""
    from labkit.checkpoint.convert.rename import read_names

    whole = [text for text in texts if Path(text).exists() or "=" not in text]
    if whole and len(texts) > 1:
        raise click.BadParameter("of several files, say of each which optimizer it is for: OPTIMIZER=FILE", param_hint="--order")
    if whole:
        return read_names(TEXT_FILE.convert(whole[0], None, None))
    orders: dict[str, list[str]] = {}
    for text in texts:
        root, _, file = text.partition("=")
        if root in orders:
            raise click.BadParameter(f"{root} is there twice", param_hint="--order")
        orders[root] = read_names(TEXT_FILE.convert(file, None, None))
    return orders or None


def _parse_part(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or not path:
        raise click.BadParameter(f"{text!r} is no NAME=PATH, such as model=pytorch_model_fsdp_0", param_hint="--part")
    return name, path

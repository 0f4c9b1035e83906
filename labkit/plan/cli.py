"""``labkit plan``: plan a training job on every rank before any rank runs."""

from __future__ import annotations

import json
import sys
from typing import Any, get_args

import click
from rich.console import Console

from labkit.plan.process import PlanningFailedError, make_plan
from labkit.plan.records import JobError, OnActivations, Saved, TrainingJob
from labkit.plan.show import render

FUNCTION = "MODULE:FUNCTION|FILE.py:FUNCTION"


@click.command()
@click.option("--model", required=True, metavar=FUNCTION, help="Builds the model; run under torch.device('meta').")
@click.option("--mesh", required=True, help="Axes and sizes, outermost first: dp=128,tp=8 or replicate=128,shard=8.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--batch", default="1x129", show_default=True, metavar="SHAPE[:DTYPE]", help="One rank's batch, such as 4x129:int64.")
@click.option("--loss", default=TrainingJob.loss, show_default=True, metavar=FUNCTION, help="Computes the loss of model and batch.")
@click.option("--blocks", help="Classes that are sharded by themselves, such as Block,Head. Default: those in a ModuleList.")
@click.option("--tp-plan", metavar=FUNCTION, help="Returns the plan for parallelize_module; needed for an axis tp.")
@click.option("--optimizer", default="AdamW", show_default=True, help=f"A class of torch.optim, {FUNCTION}, or none.")
@click.option("--dtype", help="Dtype that parameters are stored in, such as bfloat16. Default: as the model is built.")
@click.option("--param-dtype", help="MixedPrecisionPolicy: dtype for gathering and computing.")
@click.option("--reduce-dtype", help="MixedPrecisionPolicy: dtype for reducing gradients.")
@click.option("--reshard-after-forward", help="true, false, or a number of ranks, as in fully_shard.")
@click.option("--activations", type=click.Choice(get_args(OnActivations)), default="keep", show_default=True)
@click.option("--checkpoint", type=click.Choice(get_args(Saved)), default="model+optimizer", show_default=True)
@click.option("--checkpoint-threads", type=click.IntRange(min=1), default=1, show_default=True, help="Files that each rank writes.")
@click.option("--rank", "ranks", multiple=True, type=click.IntRange(min=0), help="Plan this rank too. May be repeated.")
@click.option("--peak", is_flag=True, help="Find the step's peak memory too; takes about as long again.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Time limit in seconds.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def plan(
    batch: str,
    blocks: str | None,
    optimizer: str,
    reshard_after_forward: str | None,
    timeout: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan a training job on up to 16,384 ranks: bytes on a rank, traffic of a step, checkpoint.

    torch's own FSDP2, tensor parallelism and checkpoint planner run in one process, on a process group without other ranks and on
    tensors without data. --model, --loss, --tp-plan and --optimizer are imported and run.
    """
    shape, dtype = parse_batch(batch)
    job = TrainingJob(
        **options,
        batch=shape,
        batch_dtype=dtype,
        blocks=tuple(name.strip() for name in blocks.split(",")) if blocks else (),
        optimizer=None if optimizer == "none" else optimizer,
        reshard_after_forward=parse_reshard(reshard_after_forward),
    )
    try:
        found = make_plan(job, timeout_s=timeout)
    except (JobError, PlanningFailedError, TimeoutError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        json.dump(found.as_dict(), sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, soft_wrap=not sys.stdout.isatty())
    console.print(render(found))


def parse_batch(text: str) -> tuple[tuple[int, ...], str]:
    """Parse ``4x129:int64`` into shape and dtype; the dtype is int64 if it is left out."""
    shape, _, dtype = text.partition(":")
    sizes = shape.split("x")
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise click.UsageError(f"cannot read the batch {text!r}. Write it like 4x129 or 32x1024:float32.")
    return tuple(map(int, sizes)), dtype or "int64"


def parse_reshard(text: str | None) -> bool | int | None:
    """Parse ``true``, ``false`` or a number of ranks."""
    if text is None:
        return None
    if text.isdigit():
        return int(text)
    if text.lower() not in ("true", "false"):
        raise click.UsageError(f"cannot read --reshard-after-forward {text!r}: true, false, or a number of ranks")
    return text.lower() == "true"

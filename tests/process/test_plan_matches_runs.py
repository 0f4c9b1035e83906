"""A plan, made without ranks, predicts exactly the bytes that ranks then measure."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._composable import checkpoint as recompute
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import parallelize_module

import labkit
from labkit.checkpoint import open_checkpoint
from labkit.plan import CheckpointPlan, TrainingJob
from labkit.plan.compute import compute_plan
from labkit.spmd.memory.kinds import held_memory
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.transformer import Block, ModelConfig, Transformer, next_token_loss
from labkit.spmd.offload.saved import WatchedOffload, watch_saved
from labkit.spmd.shards.sharding import shard_model
from labkit.spmd.shards.tensor_parallel import tensor_parallel_plan
from labkit.spmd.trace.collectives import count_collectives

BATCH = (2, 33)


def even() -> Transformer:
    return build_model(ModelConfig(num_layers=2))


def uneven() -> Transformer:
    """A model in which no dim 0 divides by 2 or 4, and some ranks get nothing of the last one."""
    return build_model(ModelConfig(vocab_size=251, dim=66, num_layers=2, num_heads=3, hidden_dim=157))


def measured(job: TrainingJob, axes: dict[str, int], directory: str) -> dict[str, Any]:
    """One step of the job, written once more by hand, with real values and real ranks."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model: Any = job.model()  # type: ignore[operator]
    if axes.get("tp", 1) > 1:
        parallelize_module(model, mesh["tp"], tensor_parallel_plan())
    if job.activations == "recompute":
        for block in model.layers:
            recompute(block)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if job.param_dtype else MixedPrecisionPolicy()
    data = mesh[tuple(axis for axis in axes if axis != "tp")]
    shard_model(model, data, blocks=Block, reshard_after_forward=job.reshard_after_forward, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.arange(prod(BATCH)).remainder(200).view(BATCH)
    moving = job.activations == "move"
    with WatchedOffload(model.layers, min_bytes=job.move_min_bytes) if moving else nullcontext() as offload:
        with count_collectives() as log:
            with watch_saved() as saved:
                if offload is not None:
                    offload.saved = saved
                loss = next_token_loss(model, batch)
            activations = saved.size_bytes(model)
            del saved
            loss.backward()
            optimizer.step()
        moved = offload.counts.moved_bytes if offload is not None else 0
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, thread_count=job.checkpoint_threads))
    sums: dict[tuple[str, int], tuple[int, int, int]] = {}
    for call in log.calls:
        num_calls, size_bytes, sent_bytes = sums.get((call.kind, call.group_size), (0, 0, 0))
        sums[call.kind, call.group_size] = (num_calls + 1, size_bytes + call.size_bytes, sent_bytes + call.sent_bytes)
    return {
        "memory": replace(held_memory(model, optimizer), activations=activations),
        "elements": sum(parameter.to_local().numel() for parameter in model.parameters()),
        "moved": moved,
        "sums": sums,
    }


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2}, {"model": uneven, "checkpoint_threads": 2, "reshard_after_forward": False}),
        ({"dp": 4}, {"activations": "move", "move_min_bytes": 4096}),
        ({"replicate": 2, "shard": 2}, {"model": uneven, "activations": "recompute"}),
        ({"dp": 2, "tp": 2}, {"param_dtype": "bfloat16", "reduce_dtype": "float32"}),
    ],
    ids=["fsdp-uneven-kept-whole", "fsdp-moved", "hsdp-recomputed", "fsdp-and-tp-bf16"],
)
def test_bytes_collectives_and_checkpoint_are_as_planned(axes: dict[str, int], options: dict[str, Any], tmp_path: Path) -> None:
    directory, world_size = tmp_path / "saved", prod(axes.values())
    job = TrainingJob(
        **{"model": even, **options},
        mesh=",".join(f"{axis}={size}" for axis, size in axes.items()),
        batch=BATCH,
        tp_plan=tensor_parallel_plan,
        checkpoint_dir=str(directory),
        ranks=(world_size - 1,),
    )
    plan = compute_plan(job)
    with labkit.WorkerPool(world_size, device="cpu", replace=True) as pool:
        runs = pool.run(measured, job, axes, str(directory), timeout_s=90)
    assert plan.rank(0).memory.activations > 0
    for planned in plan.ranks:
        run = runs[planned.rank]
        assert planned.memory == run["memory"], f"rank {planned.rank}"
        assert (planned.num_elements, planned.host_bytes) == (run["elements"], run["moved"])
    for run in runs.values():
        assert {(t.kind, t.group_size): (t.num_calls, t.size_bytes, t.sent_bytes) for t in plan.traffic} == run["sums"]
    assert plan.checkpoint is not None
    _check_checkpoint(plan.checkpoint, directory)


def _check_checkpoint(planned: CheckpointPlan, directory: Path) -> None:
    sizes = [path.stat().st_size for path in directory.glob("*.distcp")]
    assert planned.exact
    assert (planned.num_files, planned.num_empty_files) == (len(sizes), sizes.count(0))
    assert (planned.file_bytes, planned.largest_file_bytes) == (sum(sizes), max(sizes))
    assert planned.tensor_bytes == open_checkpoint(directory).size_bytes
    assert planned.metadata_bytes == (directory / ".metadata").stat().st_size

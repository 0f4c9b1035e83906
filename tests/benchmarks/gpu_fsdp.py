"""A decoder of one billion parameters under FSDP1 and under FSDP2, for the benchmarks that compare and migrate."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.transformer import Block
from tests.benchmarks.gpu_steps import DEVICE, ONE_BILLION, Timed, random_model, random_tokens, time_steps

WARM_UP, TIMED = 3, 8
#: Parts of the names of the kernels in which the two engines differ.
KERNELS = {
    "matrix products": ("nvjet", "gemm", "cutlass"),
    "copies on the device": ("Memcpy DtoD", "split_with_sizes_copy"),
    "casts to bfloat16": ("bfloat16_copy_kernel",),
    "gradients to float32": ("chunk_cat", "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}"),
    "NCCL": ("ncclDevKernel",),
    "the optimizer": ("FusedOptimizer",),
}


def sharded(engine: str) -> nn.Module:
    """Parameters in float32, computation in bfloat16, reduction in float32, whatever the engine."""
    model = random_model(ONE_BILLION)
    if engine == "FSDP1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device(DEVICE, torch.cuda.current_device()) if DEVICE == "cuda" else torch.device(DEVICE),
            # FSDP2 casts what a module is given; FSDP1 does so where it is asked to.
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True),
            use_orig_params=True,
        )
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return model


def train(engine: str) -> tuple[Timed, int]:
    """Times of a step, and the number of the model's parameters."""
    model = sharded(engine)
    optimizer, batch = adam(model), random_tokens(ONE_BILLION)
    time_steps(model, optimizer, batch, WARM_UP)
    return time_steps(model, optimizer, batch, TIMED), num_parameters()


def kernel_times(engine: str) -> dict[str, tuple[float, float]]:
    """Milliseconds and number of kernels of a step on the device, by purpose; ``"all"`` is all of them."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    model = sharded(engine)
    optimizer, batch = adam(model), random_tokens(ONE_BILLION)
    time_steps(model, optimizer, batch, WARM_UP)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        time_steps(model, optimizer, batch, TIMED)
    found = dict.fromkeys((*KERNELS, "all"), (0.0, 0.0))
    for event in profiled.events():
        # Ranges that FSDP and the optimizer mark are on the device too, over the kernels in them.
        if event.device_type != DeviceType.CUDA or event.is_user_annotation:
            continue
        kind = next((kind for kind, parts in KERNELS.items() if any(part in event.name for part in parts)), None)
        for name in {"all", kind} - {None}:
            ms, count = found[name]
            found[name] = ms + event.device_time_total / 1000 / TIMED, count + 1 / TIMED
    return found


def memory_left() -> int:
    """Bytes in use without any model."""
    gc.collect()
    return torch.cuda.memory_allocated()


def num_parameters() -> int:
    """Count the parameters of the whole model; a sharded model's own parameters are shards."""
    return sum(parameter.numel() for parameter in build_model(ONE_BILLION, device="meta").parameters())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam in one kernel per parameter group, as is usual on GPUs."""
    return torch.optim.Adam(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")


def save_fsdp1(path: str) -> None:
    """One step under FSDP1, then its FULL state dicts in one file, as many have them."""
    model = sharded("FSDP1")
    optimizer = adam(model)
    time_steps(model, optimizer, random_tokens(ONE_BILLION), 1)
    # On a CPU the option crashes, or lets Adam's moments share a buffer.
    options = {"offload_to_cpu": DEVICE == "cuda", "rank0_only": DEVICE == "cuda"}
    configs = FullStateDictConfig(**options), FullOptimStateDictConfig(**options)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        state = {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    if dist.get_rank() == 0:
        torch.save(state, path)


def differing(migrated: str, original: str) -> list[str]:
    """Load the migrated checkpoint into FSDP2, and name the parameters and moments that are not those of FSDP1's file.

    Ranks: collective; every rank compares whole tensors.
    """
    model = sharded("FSDP2")
    optimizer = adam(model)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=migrated)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    saved = torch.load(original, map_location="cpu", mmap=True, weights_only=True)
    pairs: list[tuple[str, Any, Any]] = []
    for name, parameter in model.named_parameters():
        pairs.append((name, parameter.full_tensor(), saved["model"][name]))
        ours, theirs = optimizer.state[parameter], saved["optimizer"]["state"][name]
        for moment in ("exp_avg", "exp_avg_sq"):
            pairs.append((f"{name} {moment}", ours[moment].full_tensor(), theirs[moment]))
    return [name for name, one, other in pairs if not torch.equal(one.cpu(), other)]


def remove(path: Path) -> None:
    """A file or folder of a benchmark."""
    import shutil

    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

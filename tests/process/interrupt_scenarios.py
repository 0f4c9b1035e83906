"""The ranks' side of the interrupt tests; run on gloo by tests/process and on NCCL by tests/gpu.

The functions run on the ranks through ``pool.run``. The objects that they make stay in this module on the rank, under a name.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
import torch.utils.data
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.transformer import Block, ModelConfig, Transformer, next_token_loss

# No size is a multiple of 4, so some shards are uneven.
TINY = ModelConfig(vocab_size=33, dim=12, num_layers=3, num_heads=2, hidden_dim=18, max_seq_len=8)

Kind = Literal[
    "fsdp2",
    "fsdp2_mixed",
    "fsdp2_accumulating",
    "fsdp2_fused",
    "hsdp",
    "fsdp2_tp",
    "fsdp1",
    "fsdp1_flat",
    "fsdp1_mixed",
    "fsdp1_fused",
    "ddp",
    "ddp_fused",
    "ddp_static",
    "ddp_accumulating",
]
Cut = Literal["missing in forward", "raises in backward", "stuck in backward", "all stuck in backward"]


@dataclass
class Training:
    """A model with its optimizer and this rank's data; with ``accumulating`` each step has two halves."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Tensor
    accumulating: bool
    losses: list[Tensor] = field(default_factory=list)

    def step(self) -> None:
        if self.accumulating:
            with self.without_sync():
                next_token_loss(self.model, self.batch.flip(1)).backward()
        loss = next_token_loss(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        if isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                yield
            return
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def tensors(self) -> list[Tensor]:
        """Losses, local parameters and local optimizer state, copied."""
        found = [*self.losses, *self.model.parameters()]
        for parameter in self.model.parameters():
            found += [item for item in self.optimizer.state.get(parameter, {}).values() if isinstance(item, Tensor)]
        return [_local(tensor).detach().clone() for tensor in found]


LIVE: dict[str, Training] = {}
SAVED: dict[str, list[Tensor]] = {}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- models ----------------------------------------------------------------------------------------------------------


def _fsdp2(model: Transformer, device: torch.device) -> nn.Module:
    return _shard(model, init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",)))


def _hsdp(model: Transformer, device: torch.device) -> nn.Module:
    return _shard(model, init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard")))


def _fsdp2_tp(model: Transformer, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("shard", "tp"))
    plan: dict[str, Any] = dict.fromkeys(("wq", "wk", "wv"), ColwiseParallel()) | {"wo": RowwiseParallel()}
    for block in model.layers:
        assert isinstance(block, Block)
        parallelize_module(block.attention, mesh["tp"], plan)
    return _shard(model, mesh["shard"])


def _fsdp2_mixed(model: Transformer, device: torch.device) -> nn.Module:
    """Compute in bfloat16, recompute the blocks in backward."""
    for i, block in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(block)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    return _shard(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def _shard(model: Transformer, mesh: Any, **options: Any) -> nn.Module:
    for block in model.layers:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _fsdp1(model: Transformer, device: torch.device, **options: Any) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, **{"use_orig_params": True, **options})


def _fsdp1_flat(model: Transformer, device: torch.device) -> nn.Module:
    return _fsdp1(model, device, use_orig_params=False)


def _fsdp1_mixed(model: Transformer, device: torch.device) -> nn.Module:
    """Compute in bfloat16, keep the parameters whole between forward and backward, gather the next block's early."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    strategy = ShardingStrategy.SHARD_GRAD_OP
    return _fsdp1(model, device, mixed_precision=precision, sharding_strategy=strategy, forward_prefetch=True)


def _ddp(model: Transformer, device: torch.device, **options: Any) -> nn.Module:
    # Buckets so small that there are several: one is reduced while the next is computed.
    return DistributedDataParallel(model, bucket_cap_mb=0.002, **options)


def _ddp_static(model: Transformer, device: torch.device) -> nn.Module:
    return _ddp(model, device, static_graph=True, gradient_as_bucket_view=True)


WRAPPERS: dict[Kind, Callable[[Transformer, torch.device], nn.Module]] = {
    "fsdp2": _fsdp2,
    "fsdp2_mixed": _fsdp2_mixed,
    "fsdp2_accumulating": _fsdp2,
    "fsdp2_fused": _fsdp2,
    "hsdp": _hsdp,
    "fsdp2_tp": _fsdp2_tp,
    "fsdp1": _fsdp1,
    "fsdp1_flat": _fsdp1_flat,
    "fsdp1_mixed": _fsdp1_mixed,
    "fsdp1_fused": _fsdp1,
    "ddp": _ddp,
    "ddp_fused": _ddp,
    "ddp_static": _ddp_static,
    "ddp_accumulating": _ddp,
}


def make(name: str, kind: Kind, device: str) -> None:
    """Build a model, its optimizer and its data under a name; the same on every call."""
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    model = WRAPPERS[kind](build_model(TINY, seed=3, device=place), place)
    share = dist.get_rank() // 2 if kind == "fsdp2_tp" else dist.get_rank()  # ranks of one TP group see the same data
    batch = torch.randint(TINY.vocab_size, (2, 9), generator=torch.Generator().manual_seed(share)).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind.endswith("fused") or None)
    LIVE[name] = Training(model, optimizer, batch, kind.endswith("accumulating"))


def train(name: str, num_steps: int) -> list[float]:
    """Take steps, and return the losses so far."""
    for _ in range(num_steps):
        LIVE[name].step()
    return [float(loss) for loss in LIVE[name].losses]


def clear_gradients(name: str) -> None:
    """Begin the next step as a script would."""
    LIVE[name].optimizer.zero_grad()


def steps_taken(name: str) -> int:
    """Optimizer steps that changed the parameters, by the optimizer's own count."""
    counts = {int(state["step"]) for state in LIVE[name].optimizer.state.values()}
    (count,) = counts
    return count


def forget_losses(names: Sequence[str]) -> None:
    """Forget all losses, because an interrupt can come between a step and the note of its loss."""
    for name in names:
        LIVE[name].losses.clear()


def keep_losses(name: str, count: int) -> None:
    """Forget the losses after the first ``count``."""
    del LIVE[name].losses[count:]


def save(name: str) -> int:
    """Remember the present state of a training, to compare with later."""
    SAVED[name] = LIVE[name].tensors()
    return len(SAVED[name])


@dataclass(frozen=True)
class Comparison:
    """The comparison of a training's tensors with saved ones, bit for bit."""

    num_values: int
    num_different: int
    gradients: int


def compare(name: str, saved: str) -> Comparison:
    """Compare every tensor of a training with what was saved under a name."""
    ours, theirs = LIVE[name].tensors(), SAVED[saved]
    different = sum(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    gradients = sum(parameter.grad is not None for parameter in LIVE[name].model.parameters())
    return Comparison(sum(tensor.numel() for tensor in ours), different, gradients)


# ---- cutting a step --------------------------------------------------------------------------------------------------


class _Cut(torch.autograd.Function):
    """The identity; its backward calls a function first."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return gradients[0], None


def cut_step(name: str, cut: Cut, signs: str) -> None:
    """Begin a step that does not end: the last rank hangs by itself, the others wait for it.

    Args:
        name: The training.
        cut: What happens.
        signs: A folder. Each rank writes a sign there when it has reached the place where the step is cut, or is about to enter
            the call that does not end.
    """
    training, rank = LIVE[name], dist.get_rank()
    culprit = rank == dist.get_world_size() - 1 or cut == "all stuck in backward"
    if not culprit:
        _sign(signs)
    elif cut == "missing in forward":
        _stay(signs)
    if culprit:
        block = next(module for module in training.model.modules() if isinstance(module, Block))
        act = _raise if cut == "raises in backward" else lambda: _stay(signs)
        # Inside the block: the gradients of its feed-forward half exist already, those of its attention do not.
        handle = block.attention.register_forward_hook(lambda module, args, output: _Cut.apply(output, act))
    try:
        training.step()
    finally:
        if culprit:
            handle.remove()


def _raise() -> None:
    raise ValueError("planted in backward")


def _stay(signs: str) -> None:
    _sign(signs)
    while True:
        time.sleep(0.01)


def _sign(signs: str) -> None:
    (Path(signs) / str(dist.get_rank())).touch()


# ---- waiting for something that does not come ------------------------------------------------------------------------

KEPT: dict[str, Any] = {}


class _SlowData(torch.utils.data.Dataset[int]):
    """A dataset whose first item takes for ever."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        time.sleep(1000)
        return index


def _loop() -> None:
    KEPT["rounds"] = 0
    while True:
        KEPT["rounds"] += 1


def _c_sleep() -> None:
    while True:  # libc's sleep ends when a signal comes, and Python's handler then raises
        ctypes.CDLL(None).sleep(1000)


def _recv(device: str) -> None:
    dist.recv(torch.ones(1, device=device), src=(dist.get_rank() + 1) % dist.get_world_size())


def _all_gather(device: str) -> None:
    ones = torch.ones(3, device=device)
    dist.all_gather([torch.empty_like(ones) for _ in range(dist.get_world_size())], ones)


def _reduce_scatter(device: str) -> None:
    ones = torch.ones(3, device=device)
    dist.reduce_scatter(torch.empty_like(ones), [ones] * dist.get_world_size())


def _tidy_up() -> None:
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        KEPT["tidied"] = True
        raise


def _swallow() -> None:
    """Run code that catches KeyboardInterrupt and goes on."""
    while True:
        try:
            time.sleep(1000)
        except KeyboardInterrupt:
            KEPT["swallowed"] = KEPT.get("swallowed", 0) + 1
            if KEPT["swallowed"] == 2:
                raise


WAITS: dict[str, Callable[[str], Any]] = {
    "Python loop": lambda device: _loop(),
    "time.sleep": lambda device: time.sleep(1000),
    "sleep in C": lambda device: _c_sleep(),
    "all_reduce": lambda device: dist.all_reduce(torch.ones(3, device=device)),
    "barrier": lambda device: dist.barrier(),
    "recv": _recv,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "new_group": lambda device: dist.new_group(list(range(dist.get_world_size()))),
    "DataLoader worker": lambda device: list(torch.utils.data.DataLoader(_SlowData(), num_workers=1)),
    "subprocess": lambda device: subprocess.run(["sleep", "1000"], check=True),
    "handler that tidies up": lambda device: _tidy_up(),
    "handler that swallows": lambda device: _swallow(),
}


def zombies() -> int:
    """Count this rank's children that have ended and were not collected."""
    return sum(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children())


def wait(what: str, ranks: Sequence[int], device: str, signs: str) -> str:
    """Wait for ever on some ranks; the others return at once."""
    KEPT.clear()
    KEPT["before"] = dist.get_rank() * 3
    if dist.get_rank() in ranks:
        _sign(signs)
        WAITS[what](device)
    return "finished"


def look(device: str) -> tuple[dict[str, Any], float]:
    """Return the kept variables, and the sum of ones over all ranks."""
    # Children that an interrupt made Python kill are waited for when it makes or counts the next.
    subprocess.run(["true"], check=True)
    multiprocessing.active_children()
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    return dict(KEPT), float(ones)

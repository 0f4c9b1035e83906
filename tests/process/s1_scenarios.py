"""The ranks' side of the seed rows S1.1 to S1.3: recomputation and offload in every order, with FSDP1, FSDP2 and replicas."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper, offload_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from labkit.spmd.memory.spy import count_forwards, spy_save_on_cpu
from labkit.spmd.model.transformer import FeedForward, ModelConfig
from labkit.spmd.offload.context import ActivationOffload, OffloadCounts

SIZES = ModelConfig(dim=16, hidden_dim=24, num_heads=2, max_seq_len=16)
ROWS = 10
NUM_LAYERS = 3
#: The bytes that autograd keeps of one layer, each storage once: its input and four hidden tensors.
LAYER_BYTES = ROWS * (SIZES.dim + 4 * SIZES.hidden_dim) * 4
INPUT_BYTES = ROWS * SIZES.dim * 4
WEIGHT_BYTES = 3 * SIZES.dim * SIZES.hidden_dim * 4

Wrap = Callable[[nn.Module], nn.Module]


class Chain(nn.Module):
    """Three feed-forward layers, one after the other.

    There is no residual stream: around one, reentrant recomputation adds the parts of a gradient in another order, so the last
    bit may differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(SIZES) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class Run:
    """One model's training on one rank.

    Attributes:
        outputs, losses: Of each iteration.
        gradients: Of this rank, after each iteration, accumulated.
        save_on_cpu: The number of times that it was entered in the first iteration, and the bytes that it moved.
        offload: The counts of labkit's offload over all iterations.
        forwards: The number of times that each layer ran, including recomputation.
    """

    outputs: list[Tensor]
    losses: list[float]
    gradients: list[list[Tensor]]
    save_on_cpu: tuple[int, int]
    offload: OffloadCounts | None
    forwards: list[int]


def whole_chain(device: str) -> Chain:
    torch.manual_seed(0)
    return Chain().to(device)


def sharder(engine: str, device: str, offload_params: bool = False) -> Wrap:
    """FSDP1 with flat or original parameters, or FSDP2, for one module."""
    here = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    def shard(module: nn.Module) -> nn.Module:
        if engine == "fsdp2":
            policy: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda")} if offload_params else {}
            return fully_shard(module, mesh=mesh, **policy)
        return FullyShardedDataParallel(
            module,
            device_id=here,
            use_orig_params=engine == "fsdp1 original parameters",
            cpu_offload=CPUOffload(offload_params=True) if offload_params else None,
        )

    return shard


def wrapper(kind: str, offloads: list[ActivationOffload]) -> Wrap:
    """Recompute, offload as torch does it, or as labkit does."""
    if kind == "labkit":

        def attach(module: nn.Module) -> nn.Module:
            offloads.append(ActivationOffload([module], min_bytes=1))
            return module

        return attach
    kinds: dict[str, Wrap] = {
        "nothing": lambda module: module,
        "checkpoint": checkpoint_wrapper,
        "reentrant": lambda module: checkpoint_wrapper(module, CheckpointImpl.REENTRANT),
        "offload_wrapper": offload_wrapper,
    }
    return kinds[kind]


def build(nesting: str, engine: str, kind: str, device: str, offload_params: bool) -> tuple[nn.Module, list[ActivationOffload]]:
    """A chain, sharded layer by layer (S1.1), or whole (S1.2), with the wrapper inside or outside."""
    offloads: list[ActivationOffload] = []
    shard, wrap, chain = sharder(engine, device, offload_params), wrapper(kind, offloads), whole_chain(device)
    if nesting == "wrap(chain(shard(layer)))":
        chain.layers = nn.ModuleList(shard(layer) for layer in chain.layers)
        return wrap(chain), offloads
    if nesting == "chain(shard(wrap(layer)))":
        chain.layers = nn.ModuleList(shard(wrap(layer)) for layer in chain.layers)
        return chain, offloads
    if nesting == "chain(wrap(shard(layer)))":
        chain.layers = nn.ModuleList(wrap(shard(layer)) for layer in chain.layers)
        return chain, offloads
    if nesting == "wrap(shard(chain))":
        return wrap(shard(chain)), offloads
    if nesting == "shard(wrap(chain))":
        return shard(wrap(chain)), offloads
    raise KeyError(nesting)


def run(
    nesting: str, engine: str, kind: str, device: str, *, offload_params: bool = False, steps: int = 2, by_hand: str = ""
) -> Run:
    """Train, and note everything that has to agree with the other runs.

    Args:
        by_hand: Call the model through ``checkpoint`` here, ``reentrant`` or not; with a ``kind`` that offloads, in a context.
    """
    model, offloads = build(nesting, engine, "nothing" if by_hand else kind, device, offload_params)
    layers = [module for module in model.modules() if isinstance(module, FeedForward)]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    if by_hand and kind == "offload_wrapper":
        context = lambda: save_on_cpu(pin_memory=True)  # noqa: E731
    torch.manual_seed(dist.get_rank())
    x = torch.randn(ROWS, SIZES.dim, device=device, requires_grad=True)
    result = Run([], [], [], (0, 0), None, [])
    with count_forwards(layers) as forwards:
        for step in range(steps):
            with spy_save_on_cpu() as spied, context():
                out = checkpoint(model, x, use_reentrant=by_hand == "reentrant") if by_hand else model(x)
            loss = out.square().mean()
            loss.backward()
            if step == 0:
                result.save_on_cpu = (spied.num_entered, spied.moved_bytes)
            result.outputs.append(out.detach().cpu())
            result.losses.append(loss.item())
            result.gradients.append([gradient.clone() for gradient in local_gradients(model)])
    result.forwards = forwards
    result.offload = total([offload.counts for offload in offloads]) if offloads else None
    return result


def total(counts: list[OffloadCounts]) -> OffloadCounts:
    names = OffloadCounts.__dataclass_fields__
    return OffloadCounts(**{name: sum(getattr(count, name) for count in counts) for name in names})


def local_gradients(model: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [(grad.to_local() if isinstance(grad, DTensor) else grad).cpu() for grad in gradients]


# S1.3 -----------------------------------------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """A sequence that recomputes itself, or does not."""

    def __init__(self, recompute: bool, reentrant: bool) -> None:
        super().__init__()
        self.seq = nn.Sequential(*[nn.Linear(20, 20) for _ in range(4)])
        self.recompute, self.reentrant = recompute, reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.seq, x, use_reentrant=self.reentrant) if self.recompute else self.seq(x)
        return out


class Part(nn.Module):
    """Two recomputed submodules between layers."""

    def __init__(self, recompute: bool, reentrant: bool) -> None:
        super().__init__()
        self.l1 = nn.Linear(20, 20)
        self.s1, self.s2 = Recomputed(recompute, reentrant), Recomputed(recompute, reentrant)
        self.l2 = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.l2(self.s2(self.s1(self.l1(x))).relu())
        return out


class Nested(nn.Module):
    """Two such parts, each wrapped as a whole."""

    def __init__(self, recompute: bool, reentrant: bool) -> None:
        super().__init__()
        self.l1 = nn.Linear(20, 20)
        self.first, self.second = Part(recompute, reentrant), Part(recompute, reentrant)
        self.l2 = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.l2(self.second(self.first(self.l1(x).relu())))
        return out


def nested_gradients(engine: str, device: str, recompute: bool, reentrant: bool) -> dict[str, Tensor]:
    """Names and gradients of this rank, one backward."""
    torch.manual_seed(0)
    model: nn.Module = Nested(recompute, reentrant).to(device)
    here = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    for name in ("first", "second"):
        part = deepcopy(getattr(model, name))
        if engine.startswith("fsdp1"):
            strategy = ShardingStrategy.NO_SHARD if engine == "fsdp1 not sharded" else ShardingStrategy.FULL_SHARD
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
                part = FullyShardedDataParallel(part, sharding_strategy=strategy, device_id=here, use_orig_params=True)
        elif engine == "ddp":
            part = DistributedDataParallel(part, static_graph=reentrant)
        elif engine == "replicate":
            replicate(part)
        elif engine == "fsdp2":
            fully_shard(part, mesh=init_device_mesh(device, (dist.get_world_size(),)))
        setattr(model, name, part)
    torch.manual_seed(dist.get_rank())
    model(torch.randn(4, 20, device=device)).square().mean().backward()
    named = ((name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None)
    return {name: (grad.to_local() if isinstance(grad, DTensor) else grad).cpu() for name, grad in named}

"""The trainings that the check of exercise 4 in notebook 04 shows to a judge: correct ones, and some with bugs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from labkit.course.labs.checks import from_cell

if TYPE_CHECKING:
    from torch import Tensor, nn

Run = dict[str, Any]  # "losses", "gradients" and "weights"

_STEPS, _MICRO = 3, 2
_LEARNING_RATE = 1e-2
PLANTED = ("again", "rounded", "doubled", "misplaced_gradients", "misplaced_weights", "misplaced_losses")

_kept: dict[str, Run] = {}


def trained(kinds: Iterable[str]) -> dict[str, Run]:
    """Train, or return the runs that an earlier attempt left on the ranks, so that a second attempt is answered at once.

    Ranks: collective.
    """
    import torch
    import torch.distributed as dist

    kinds = list(kinds)
    # An attempt that was cut off may have left runs on only some ranks, but training is collective.
    ready = torch.tensor(int(all(kind in _kept for kind in kinds)), device=from_cell("device"))
    dist.all_reduce(ready, op=dist.ReduceOp.MIN)
    if not ready:
        _kept.update({kind: _train(kind) for kind in kinds})
    return {kind: _kept[kind] for kind in kinds}


def planted(kind: str, run: Run) -> Run:
    """Change one thing in a copy of the reference."""
    import torch

    if kind == "rounded":
        run["losses"] = _next_place(torch.tensor(run["losses"])).tolist()
        for part in ("gradients", "weights"):
            # Keep zeros, because a sum of zeros is zero in any order.
            run[part] = {name: tensor + tensor.sign() * _last_place(tensor) for name, tensor in run[part].items()}
    elif kind == "last_places":
        run["losses"] = _next_place(torch.tensor(run["losses"])).tolist()
        for part in ("gradients", "weights"):
            run[part] = {name: _next_place(tensor) for name, tensor in run[part].items()}
    elif kind == "doubled":
        run["gradients"] = {name: 2 * tensor for name, tensor in run["gradients"].items()}
    elif kind == "misplaced_losses":
        run["losses"] = [*run["losses"][1:], run["losses"][0]]
    elif kind.startswith("misplaced_"):
        part = kind.removeprefix("misplaced_")
        run[part] = {name: tensor.flatten().roll(1).view_as(tensor) for name, tensor in run[part].items()}
    return run


def _next_place(tensor: Tensor) -> Tensor:
    """Change each number by one unit in its own last place."""
    import torch

    return torch.nextafter(tensor, torch.tensor(float("inf")))


def _last_place(tensor: Tensor) -> Tensor:
    """Return one unit in the last place of the largest number."""
    largest = tensor.abs().max()
    return _next_place(largest) - largest


def copied(run: Run) -> Run:
    """Copy a run, so that a judge that modifies its arguments does no harm."""
    return {
        "losses": list(run["losses"]),
        **{part: {name: tensor.clone() for name, tensor in run[part].items()} for part in ("gradients", "weights")},
    }


def _train(kind: str) -> Run:
    """Return this rank's losses, whole gradients after the first step's backward, and whole weights at the end."""
    import torch

    from labkit.spmd import BatchSampler, next_token_loss

    rank, world_size, device = (from_cell(name) for name in ("rank", "world_size", "device"))
    model, held, sync = _built(kind)
    # Update one tensor at a time: on a GPU, torch would use one call for all, which refuses to mix sharded and plain tensors.
    made = torch.optim.AdamW if kind == "decay" else torch.optim.Adam
    optimizer = made(held, lr=_LEARNING_RATE, foreach=False)
    rows = BatchSampler(batch_size=2 * world_size, seq_len=12, seed=5, rank=rank, world_size=world_size, device=device)
    losses, gradients = [], {}
    for step in range(_STEPS):
        for micro in range(_MICRO):
            last = micro == _MICRO - 1
            sync(last)
            loss = next_token_loss(model, next(rows)) / _MICRO
            losses.append(loss.item())
            if not (kind == "last_micro" and last and step == 0):
                loss.backward()
        if kind in ("reference", "sum", "stale", "last_micro", "decay"):
            _reduce(model, 1 if kind == "sum" else world_size)
        if step == 0:
            gradients = {name: _whole(p.grad) for name, p in _named(model)}
        optimizer.step()
        model.zero_grad()
    return {"losses": losses, "gradients": gradients, "weights": {name: _whole(p) for name, p in _named(model)}}


def _reduce(model: nn.Module, divide_by: int) -> None:
    """Add up the gradients of all ranks in one call, and divide them."""
    import torch
    import torch.distributed as dist

    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= divide_by
    for gradient, piece in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(piece.view_as(gradient))


def _named(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name.removeprefix("module."), parameter) for name, parameter in model.named_parameters()]


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().clone()


def _built(kind: str) -> tuple[nn.Module, list[Any], Callable[[bool], object]]:
    """Return the model, the tensors that its optimizer holds, and the function to call before each micro-batch."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from labkit.spmd import Block, ModelConfig, build_model, shard_model

    device = from_cell("device")
    config = ModelConfig(dim=16, num_layers=2, num_heads=2, hidden_dim=24, max_seq_len=16)
    model = build_model(config, seed=6, device=device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
        return wrapped, list(wrapped.parameters()), lambda last: setattr(wrapped, "require_backward_grad_sync", last)
    if kind == "fsdp2":
        sharded: Any = shard_model(model, mesh, blocks=Block)
        return sharded, list(sharded.parameters()), sharded.set_requires_gradient_sync
    if kind == "plain_head":
        for block in model.layers:
            fully_shard(block, mesh=mesh)
    held = list(build_model(config, seed=6, device=device).parameters()) if kind == "stale" else list(model.parameters())
    return model, held, lambda last: None

"""Exercise 4 of notebook 04: is it the same training, or does it only look like it?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.course.checks import Pool, from_cell, refuse, require_on_ranks
from labkit.errors import RunTimeoutError

if TYPE_CHECKING:
    from torch import Tensor, nn

_STEPS, _MICRO = 3, 2


@dataclass(frozen=True)
class _Kind:
    """A run that the judge has to tell: a way to train, or the reference with something planted in it.

    Attributes:
        what: In words.
        same: Whether it is the same training, up to the order of sums.
        needs: The number of ranks from which on it differs, or can be made.
        hint: For a judge that is wrong about it.
    """

    what: str
    same: bool
    needs: int
    hint: str


_NOISE = (
    "It adds the same numbers in another order, so the last bits differ. Exact equality is more than two right runs can promise."
)
_KINDS = {
    "again": _Kind("the reference, trained again", True, 1, "It is equal bit for bit."),
    "ddp": _Kind("DDP", True, 2, _NOISE),
    "fsdp2": _Kind("FSDP2", True, 1, _NOISE),
    "rounded": _Kind("the reference with every number moved by one unit of its last place", True, 1, _NOISE),
    "sum": _Kind(
        "gradients added up and not divided by the number of ranks",
        False,
        2,
        "Adam divides a gradient by its own size, so losses and weights hardly show it. The gradients themselves do.",
    ),
    "no_sync": _Kind(
        "gradients that nobody averages", False, 2, "Each rank follows its own gradient. Compare the gradients, or the weights."
    ),
    "stale": _Kind(
        "an optimizer that holds other tensors than the model",
        False,
        1,
        "Its first gradients are right, since they come before the first step. Look at what training has changed: the weights.",
    ),
    "plain_head": _Kind(
        "blocks that are sharded and a head that is not",
        False,
        2,
        "Most gradients are right. Compare every name, not the first one, and not a mean over all.",
    ),
    "last_micro": _Kind(
        "a last micro-batch whose gradient is lost",
        False,
        1,
        "The losses of the first step are right. Its gradients are not.",
    ),
    "doubled": _Kind(
        "gradients twice as large, with the losses and weights of the reference",
        False,
        1,
        "Weights do not tell everything, since Adam takes a constant factor out. Compare the gradients too.",
    ),
    "misplaced_gradients": _Kind(
        "gradients one place further, with the losses and weights of the reference",
        False,
        1,
        "Compare the gradients element by element. In a sum or a mean of differences, plus and minus cancel.",
    ),
    "misplaced_weights": _Kind(
        "weights one place further, with the losses and gradients of the reference",
        False,
        1,
        "Compare the weights element by element. In a sum or a mean of differences, plus and minus cancel.",
    ),
}
_PLANTED = ("rounded", "doubled", "misplaced_gradients", "misplaced_weights")


def check_same_training(pool: Pool, *, timeout_s: float = 20.0) -> str:
    """Exercise 4: ``same_training(run, reference)`` accepts another order of sums and refuses eight bugs.

    Eight runs are really made on the ranks. Four are copies of the reference with something planted: rounding for any number of
    ranks, and differences that a judge overlooks which compares one part only, or sums. A run counts as accepted when every rank
    accepts what it saw of it.

    Args:
        pool: The pool; ``same_training`` is defined on its ranks.
        timeout_s: Seconds after which a rank counts as hung.

    Returns:
        A line with the number of runs, and what this number of ranks cannot show.

    Raises:
        ExerciseError: A wrong verdict, and the message says on which run; or the judge hangs.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    require_on_ranks(pool, "same_training")
    shown = [name for name, kind in _KINDS.items() if pool.world_size >= kind.needs]
    try:
        verdicts = pool.run(_verdicts, shown, timeout_s=timeout_s)
    except RunTimeoutError as error:
        refuse(
            f"same_training hangs: {error}",
            "a verdict on every rank.",
            "Each rank judges what it saw itself. If you call a collective, every rank has to reach it in every run.",
        )
    for name in shown:
        kind = _KINDS[name]
        accepted = all(verdict[name] for verdict in verdicts.values())
        if accepted != kind.same:
            said = "accepted" if accepted else f"refused by rank {next(r for r, v in verdicts.items() if not v[name])}"
            refuse(f"{kind.what}: {said}.", "accepted." if kind.same else "refused by at least one rank.", kind.hint)
    bugs = sum(not _KINDS[name].same for name in shown)
    left_out = len(_KINDS) - len(shown)
    more = f" {left_out} of {len(_KINDS)} runs need two ranks and were left out." if left_out else ""
    return f"Solved: {len(shown) - bugs} right runs accepted, {bugs} bugs refused.{more}"


# On the ranks -----------------------------------------------------------------------------------------------------------


def _verdicts(kinds: list[str]) -> dict[str, bool]:
    judge = from_cell("same_training")
    reference = _train("reference")
    runs = ((kind, _planted(kind, _copy(reference)) if kind in _PLANTED else _train(kind)) for kind in kinds)
    return {kind: bool(judge(run, _copy(reference))) for kind, run in runs}


def _planted(kind: str, run: dict[str, Any]) -> dict[str, Any]:
    """A copy of the reference with one thing changed in it."""
    import torch

    if kind == "rounded":
        above = torch.tensor(float("inf"))
        for part in ("gradients", "weights"):
            run[part] = {name: torch.nextafter(tensor, above) for name, tensor in run[part].items()}
        run["losses"] = torch.nextafter(torch.tensor(run["losses"]), above).tolist()
    elif kind == "doubled":
        run["gradients"] = {name: 2 * tensor for name, tensor in run["gradients"].items()}
    else:
        part = kind.removeprefix("misplaced_")
        run[part] = {name: tensor.flatten().roll(1).view_as(tensor) for name, tensor in run[part].items()}
    return run


def _copy(run: dict[str, Any]) -> dict[str, Any]:
    """So that a judge that changes what it is given harms nobody."""
    return {
        "losses": list(run["losses"]),
        **{part: {name: tensor.clone() for name, tensor in run[part].items()} for part in ("gradients", "weights")},
    }


def _train(kind: str) -> dict[str, Any]:
    """Losses of this rank, whole gradients after the first step's backward, whole weights at the end."""
    import torch
    import torch.distributed as dist

    from labkit.spmd import BatchSampler, next_token_loss

    rank, world_size, device = (from_cell(name) for name in ("rank", "world_size", "device"))
    model, held, sync = _built(kind)
    # One tensor at a time: on a GPU torch updates them in one call, which refuses sharded and plain ones together.
    optimizer = torch.optim.Adam(held, lr=1e-2, foreach=False)
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
        if kind in ("reference", "again", "sum", "stale", "last_micro"):
            for parameter in model.parameters():
                _reduce(parameter, 1 if kind == "sum" else dist.get_world_size())
        if step == 0:
            gradients = {name: _whole(p.grad) for name, p in _named(model)}
        optimizer.step()
        model.zero_grad()
    return {"losses": losses, "gradients": gradients, "weights": {name: _whole(p) for name, p in _named(model)}}


def _reduce(parameter: Tensor, divide_by: int) -> None:
    import torch.distributed as dist

    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= divide_by


def _named(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name.removeprefix("module."), parameter) for name, parameter in model.named_parameters()]


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().clone()


def _built(kind: str) -> tuple[nn.Module, list[Any], Callable[[bool], object]]:
    """The model, the tensors that its optimizer holds, and what to call before each micro-batch."""
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

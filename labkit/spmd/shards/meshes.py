"""Two-axis meshes for FSDP over tensor parallelism (TP), with checks for cases that torch accepts but gets wrong.

Apply TP first, then FSDP, with the ``dp`` axis outside the ``tp`` axis. FSDP2 is correct with either order of the axes. FSDP1 is
not: its checkpoint assumes the order (dp, tp) regardless of the mesh, and raises no error (torch removed the check that
``parallelize_module`` once had).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from labkit.errors import LabkitError
from labkit.spmd.shards.layouts import MeshRecord
from labkit.spmd.shards.sharding import Blocks, shard_model
from labkit.spmd.shards.tensor_parallel import check_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class MeshError(LabkitError, ValueError):
    """The mesh cannot be made, or the operation would give wrong results on it."""


def make_mesh(device_type: str, *, tp: int | None = None) -> DeviceMesh:
    """Arrange all ranks as ``("dp", "tp")``, with the ranks of a TP group next to each other, because TP needs the fastest links.

    Args:
        device_type: ``cpu`` or ``cuda``.
        tp: Ranks in a TP group; by default 2 if that divides the world size, else 1, which means no TP.

    Raises:
        MeshError: ``tp`` does not divide the world size.

    Ranks: collective.
    """
    world_size = dist.get_world_size()
    if tp is None:
        tp = 2 if world_size % 2 == 0 else 1
    if tp < 1 or world_size % tp:
        divisors = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        raise MeshError(f"{world_size} ranks cannot be arranged in TP groups of {tp}. Sizes that divide {world_size}: {divisors}.")
    return init_device_mesh(device_type, (world_size // tp, tp), mesh_dim_names=("dp", "tp"))


def check_mesh(mesh: DeviceMesh, *, fsdp: Literal[1, 2], dp: str = "dp", tp: str = "tp") -> DeviceMesh:
    """Refuse a mesh on which FSDP over TP would silently go wrong.

    Args:
        mesh: The whole mesh, not one of its axes.
        fsdp: 1 for ``FullyShardedDataParallel``, 2 for ``fully_shard``.
        dp: Name of the axis over which FSDP shards.
        tp: Name of the axis over which TP splits.

    Returns:
        The mesh.

    Raises:
        MeshError: The mesh has no names or lacks one of the two axes; or FSDP1 is to shard over an axis inside the TP axis. In that
            case it trains correctly but saves wrong weights or, if an axis has only one rank, does not train at all.

    Ranks: local; equal on all ranks.
    """
    names = tuple(mesh.mesh_dim_names or ())
    if not {dp, tp} <= set(names):
        has = f"axes {', '.join(names)}" if names else "no named axes"
        raise MeshError(f"FSDP over TP needs a mesh with the axes {dp!r} and {tp!r}; this one has {has}. Use make_mesh().")
    if fsdp == 1 and names.index(dp) > names.index(tp):
        raise MeshError(
            f"FSDP1 over the mesh {names}: {dp!r} is inside {tp!r}. With two ranks on each axis it trains correctly, but every "
            f"sharded checkpoint holds wrong weights, without an error. Make the mesh with {dp!r} outside: ({dp!r}, {tp!r}), or "
            "use fully_shard."
        )
    return mesh


def mesh_record(mesh: DeviceMesh) -> MeshRecord:
    """Return the mesh as plain data, for ``labkit.notebook.pictures.mesh_maps`` to draw. Ranks: local."""
    names = tuple(mesh.mesh_dim_names or ("",) * mesh.ndim)
    return MeshRecord(names, tuple(mesh.shape), tuple(int(rank) for rank in mesh.mesh.flatten().tolist()))


def shard_2d(
    model: ModuleT,
    mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle],
    *,
    blocks: Blocks,
    reshard_after_forward: bool | int | None = None,
) -> ModuleT:
    """Apply TP by a plan over the ``tp`` axis, then FSDP2 over the ``dp`` axis.

    Args:
        model: The whole model, equal on all ranks. Changed in place.
        mesh: A mesh with the axes ``dp`` and ``tp``, see `make_mesh`. FSDP gets every axis but ``tp``, so ``("replicate", "dp",
            "tp")`` means HSDP over TP.
        plan: As for ``parallelize_module``; every key and size is checked first. It is not applied if ``tp`` has one rank.
        blocks: The FSDP units, as in `shard_model`.
        reshard_after_forward: As in `shard_model`.

    Returns:
        The model.

    Raises:
        MeshError: See `check_mesh`.
        ParallelPlanError: See `check_plan`.
        ShardingError: See `shard_model`.

    Ranks: collective.
    Blocks: for the broadcasts of the TP parameters and one all-reduce.
    """
    check_mesh(mesh, fsdp=2)
    tp = mesh["tp"]
    if tp.size() > 1:
        check_plan(model, plan, tp.size(), dp_size=mesh["dp"].size())
        parallelize_module(model, tp, dict(plan))
    data_axes = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    return shard_model(model, mesh[data_axes], blocks=blocks, reshard_after_forward=reshard_after_forward)


def fsdp1_extended(model: nn.Module) -> list[str]:
    """Return the names of the FSDP1 modules with the "2D extension", ``""`` for the root.

    FSDP1 switches it on if its mesh is an axis of a larger one. The extension turns parameters that are DTensors on the other axis
    into plain tensors for the flat parameter, and the shards in a state dict into two-axis DTensors. FSDP2 does not need it.

    Ranks: local.
    """
    names = {module: name for name, module in model.named_modules()}
    # Use no default for the attribute: if torch renames it, this must raise rather than report "no extension".
    return [names[unit] for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._fsdp_extension is not None]


def fsdp1_over_tp(model: nn.Module) -> list[str]:
    """Return the names of the FSDP1 modules whose flat parameters hold tensor-parallel parameters, ``""`` for the root.

    Ranks: local.
    """
    names = {module: name for name, module in model.named_modules()}
    units = FullyShardedDataParallel.fsdp_modules(model)
    return [names[unit] for unit in units if unit._handle is not None and any(unit._handle.flat_param._param_extensions)]


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], **options: Any) -> None:
    """Call ``set_optimizer_state_dict``, but refuse a case in which torch would corrupt the state.

    Args:
        model: FSDP1, FSDP2 or plain.
        optimizer: Built from the model's parameters as they are now.
        state: The result of ``get_optimizer_state_dict``, possibly after a checkpoint was loaded into it.
        **options: Further arguments of ``set_optimizer_state_dict``.

    Raises:
        MeshError: The model is FSDP1 over TP. There FSDP1 gathers each moment whole, but every rank keeps the leading elements of
            the *whole* tensor instead of those of its TP shard, so TP weights get other elements' moments.

    Ranks: collective.
    Blocks: as long as ``set_optimizer_state_dict``.
    """
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    if units := fsdp1_over_tp(model):
        held = "1 FSDP1 unit of this model holds" if len(units) == 1 else f"{len(units)} FSDP1 units of this model hold"
        raise MeshError(
            f"{held} tensor-parallel parameters. Setting the optimizer state there gives split weights the moments of other "
            "elements, without an error. The state that get_optimizer_state_dict saved is right: load it into the same model "
            "under fully_shard."
        )
    set_optimizer_state_dict(model, optimizer, state, **options)

"""The model of exercise 4 in notebook 05, whose gradients are cut in every way that FSDP over TP cuts them."""

from __future__ import annotations

from typing import Any

from labkit.course.labs.checks import from_cell


def norm_model() -> Any:
    """Make a model with gradients on a two-axis mesh and on only its dp axis; one parameter has no gradient.

    Gradients on both axes are cut twice, or cut once and copied. If TP splits the model, two more are cut as ``fully_shard`` cuts
    a column-parallel and a row-parallel layer; the first of these has a ``_StridedShard``.

    Ranks: collective; called in a cell or by a check, on the ranks of a pool.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    device, world_size = from_cell("device"), from_cell("world_size")
    across = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (world_size // across, across), mesh_dim_names=("dp", "tp"))
    layouts: dict[str, tuple[tuple[int, ...], Any, list[Any]]] = {
        "twice": ((24, 16), mesh, [Shard(0), Shard(1)]),
        "uneven": ((7, 30), mesh, [Shard(0), Shard(0)]),
        "copied on dp": ((18, 16), mesh, [Replicate(), Shard(0)]),
        "copied on tp": ((10, 6), mesh, [Shard(0), Replicate()]),
        "norm": ((320,), mesh["dp"], [Shard(0)]),
        "frozen": ((4,), mesh["dp"], [Shard(0)]),
    }
    model = torch.nn.Module()
    generator = torch.Generator().manual_seed(5)
    for name, (shape, where, placements) in layouts.items():
        full = torch.randn(shape, generator=generator).to(device)
        parameter = torch.nn.Parameter(distribute_tensor(full, where, placements))
        if name != "frozen":
            parameter.grad = distribute_tensor(full * 0.5, where, placements)
        model.register_parameter(name, parameter)
    pair = torch.nn.Sequential(torch.nn.Linear(12, 16, bias=False), torch.nn.Linear(16, 12, bias=False)).to(device)
    for parameter in pair.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(device)
    if across > 1:
        parallelize_module(pair, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(pair, mesh=mesh["dp"])
    for parameter in pair.parameters():
        parameter.grad = parameter.detach() * 0.5
    model.register_module("pair", pair)
    return model

"""The model whose steps the checks of notebook 04 record: layers in groups that compute next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.course.labs.checks import from_cell

WIDTH = 12


def sharded_row(widths: Sequence[int], lengths: Sequence[int], *, reshard: bool | None = None, prefetch: bool = True) -> Any:
    """Make a row of layers, sharded group by group and then as a whole.

    Args:
        widths: The inner width of each layer's two matrices.
        lengths: The number of layers in each group.
        reshard: As ``reshard_after_forward`` of `fully_shard`, but only for the groups; the root keeps the default.
        prefetch: Whether backward gathers the next group early.

    Ranks: collective.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    device = from_cell("device")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, begin = _row(widths).to(device), 0
    for length in lengths:
        group = list(model.layers[begin : begin + length])
        fully_shard(group if length > 1 else group[0], mesh=mesh, reshard_after_forward=reshard)
        begin += length
    fully_shard(model, mesh=mesh)
    for module in model.modules() if not prefetch else ():
        if isinstance(module, FSDPModule):
            # An empty list would mean the default. Naming the module itself names one that is already whole.
            module.set_modules_to_backward_prefetch([module])
    return model


def forward_and_backward(model: Any) -> None:
    """Run one micro-batch. Ranks: collective."""
    import torch

    model(torch.ones(2, WIDTH, device=from_cell("device"))).sum().backward()


def _row(widths: Sequence[int]) -> Any:
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.full((WIDTH, width), 0.01))
            self.down = nn.Parameter(torch.full((WIDTH, width), 0.01))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (x @ self.up) @ self.down.T

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.eye(WIDTH))
            self.layers = nn.ModuleList(Layer(width) for width in widths)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x @ self.first
            for layer in self.layers:
                x = layer(x)
            return x

    return Row()

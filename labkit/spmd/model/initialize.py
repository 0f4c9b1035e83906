"""Weights that depend only on a seed: not on the device, the rank, the world size or the sharding."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from labkit.spmd.model.transformer import ModelConfig, Transformer, rotary_tables


def build_model(config: ModelConfig | None = None, *, seed: int = 0, device: torch.device | str | None = None) -> Transformer:
    """Build the whole, unsharded model on a device.

    Args:
        config: Sizes; the default has 176,576 parameters.
        seed: Determines every parameter, see `init_weights`.
        device: The model's device; by default torch's default device, which is the CPU. A model on ``meta`` has no values: shard
            it, call ``to_empty``, then `init_weights`.

    Ranks: local.
    """
    wanted = torch.get_default_device() if device is None else torch.device(device)
    with torch.device("meta"):
        model = Transformer(config or ModelConfig())
    if wanted.type != "meta":
        model.to_empty(device=wanted)
        init_weights(model, seed)
    return model


def init_weights(model: Transformer, seed: int) -> None:
    """Fill every parameter and buffer of a plain or sharded model.

    Each parameter is drawn as a full tensor from its own CPU generator, seeded by ``seed`` and the parameter's name; a sharded
    model keeps this rank's part of it. A DTensor's own initialisation on a CPU mesh would give every rank the same numbers.

    Ranks: local. No communication, even for a sharded model.

    Raises:
        RuntimeError: A parameter is still on the meta device; call ``model.to_empty(device=...)`` first.
    """
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                raise RuntimeError(f"{name} is on the meta device, without storage; call model.to_empty(device=...) first")
            parameter.copy_(_as_sharded_like(parameter, _initial_value(model.config, name, parameter.shape, seed)))
        for buffer, table in zip((model.rope_cos, model.rope_sin), rotary_tables(model.config), strict=True):
            buffer.copy_(table)


def _initial_value(config: ModelConfig, name: str, shape: torch.Size, seed: int) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    # Projections that add to the residual stream start smaller the deeper the model is (Radford et al., 2019).
    depth = (2 * config.num_layers) ** 0.5 if name.endswith(("wo.weight", "w2.weight")) else 1.0
    return torch.randn(shape, generator=generator) * (0.02 / depth)


def _as_sharded_like(parameter: Tensor, full: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return full
    # With src_data_rank=None nothing is sent: every rank drew the same full tensor and keeps its part of it.
    return distribute_tensor(full.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)

"""This rank's pieces of FSDP1's flat parameters, listed parameter by parameter."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from labkit.spmd.shards.records import FlatShare

_WRAPPER = "_fsdp_wrapped_module."


def flat_shares(model: nn.Module) -> list[FlatShare]:
    """List this rank's part of every parameter of an FSDP1 model, in the order of the flat parameters.

    Args:
        model: A model wrapped with ``use_orig_params=True``, so that each parameter is a view of this rank's piece of a flat one.

    Raises:
        ValueError: The model exposes flat parameters instead (``use_orig_params=False``).

    Ranks: local.
    """
    units = sorted(
        (name.replace(_WRAPPER, "").removesuffix("_fsdp_wrapped_module").rstrip(".") if name else "")
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    )
    shares = []
    for raw, parameter in model.named_parameters():
        if raw.endswith("_flat_param"):
            raise ValueError(f"{raw} is a flat parameter: wrap with use_orig_params=True to see what it holds.")
        name = raw.replace(_WRAPPER, "")
        unit = max((unit for unit in units if not unit or name.startswith(f"{unit}.")), key=len)
        shares.append(FlatShare(unit, name, parameter.numel()))
    return shares

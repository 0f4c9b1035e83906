"""What became of each FSDP1 argument in FSDP2: plain data without torch, which a test checks against both signatures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["changed", "your code", "gone"]


@dataclass(frozen=True)
class MovedArgument:
    """One argument of ``FullyShardedDataParallel`` and its replacement in FSDP2.

    Attributes:
        old: Its name in FSDP1.
        new: An argument of ``fully_shard``, a method of ``FSDPModule`` with ``()``, or empty if there is none.
        kind: ``changed``: same purpose, different behaviour. ``your code``: torch no longer does it. ``gone``: now always on. No
            argument kept its behaviour.
        note: Advice for moving to FSDP2.
    """

    old: str
    new: str
    kind: Kind
    note: str


ARGUMENTS: tuple[MovedArgument, ...] = (
    MovedArgument("device_mesh", "mesh", "changed", "two axes always mean copies and pieces; in FSDP1 only under HYBRID_SHARD"),
    MovedArgument("process_group", "mesh", "changed", "a mesh of ranks, which has its own groups, instead of a group"),
    MovedArgument(
        "sharding_strategy",
        "reshard_after_forward",
        "changed",
        "FULL_SHARD: True, SHARD_GRAD_OP: False; NO_SHARD and HYBRID_SHARD: by the mesh",
    ),
    MovedArgument("mixed_precision", "mp_policy", "changed", "inputs are cast at every sharded module; buffers stay as they are"),
    MovedArgument("cpu_offload", "offload_policy", "changed", "CPUOffloadPolicy(); pins memory by default"),
    MovedArgument("ignored_states", "ignored_params", "changed", "a set of parameters"),
    MovedArgument("ignored_modules", "ignored_params", "changed", "a set of parameters"),
    MovedArgument(
        "backward_prefetch", "set_modules_to_backward_prefetch()", "changed", "on by default; an empty list leaves it on"
    ),
    MovedArgument("forward_prefetch", "set_modules_to_forward_prefetch()", "changed", "which modules, not whether"),
    MovedArgument("auto_wrap_policy", "", "your code", "a loop from the inside out; the root last"),
    MovedArgument("sync_module_states", "", "your code", "same seed everywhere, or broadcast before sharding"),
    MovedArgument("param_init_fn", "", "your code", "meta device, fully_shard, to_empty, initialise"),
    MovedArgument("device_id", "", "your code", "build or move the model there first"),
    MovedArgument("use_orig_params", "", "gone", "names stay, the objects are new: make the optimizer afterwards"),
    MovedArgument("limit_all_gathers", "", "gone", "always limited"),
)

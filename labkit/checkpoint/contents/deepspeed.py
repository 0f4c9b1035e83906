"""Know DeepSpeed's partitions by DeepSpeed's own keys. labkit does not join them; the program that cut them does."""

from __future__ import annotations

from labkit.checkpoint.errors import RankDivergenceError
from labkit.checkpoint.index.model import Checkpoint
from labkit.checkpoint.wording import listed

#: Under these keys a rank has its partition of the flattened fp32 parameters: stages 1 and 2, stage 3.
_PARTITIONS = frozenset({"single_partition_of_fp32_groups", "fp32_flat_groups"})
_SHAPES = "param_shapes"
#: Over how many ranks tensor parallelism has cut the model; no key says along which dims.
_CUT = "mp_world_size"


def refuse_partitions(checkpoint: Checkpoint, part: Checkpoint) -> None:
    """Raise :class:`RankDivergenceError` if the entries to copy hold partitions of tensors, or the placeholders of ZeRO stage 3.

    Args:
        checkpoint: The checkpoint.
        part: It without what is left out.
    """
    keys = [key for key, entry in part.tensors.items() if _PARTITIONS.intersection(map(str, entry.path))]
    problems = [f"{listed(keys, most=4)}: a rank's partition of the flattened parameters, and no whole tensor"] if keys else []
    shaped = any(_SHAPES in map(str, value.path) for value in checkpoint.values.values())
    empty = [entry.key for entry in part.section("model") if not entry.numel]
    problems += [f"{key} is empty, as ZeRO stage 3 leaves a parameter of which each rank has a part" for key in empty if shaped]
    cut = [value.inline for value in checkpoint.values.values() if value.path[-1] == _CUT and isinstance(value.inline, int)]
    if max(cut, default=1) > 1 and part.section("model"):
        raise RankDivergenceError(
            checkpoint.path,
            [f"{_CUT} is {max(cut)}: tensor parallelism has cut the model, and each file holds shards of its tensors"],
            advice="labkit does not join them, since no file says along which dims they were cut. Let the program that cut them "
            "join them, or save them as DTensors.",
        )
    if problems:
        raise RankDivergenceError(
            checkpoint.path,
            problems,
            advice="These are partitions of DeepSpeed's ZeRO, which labkit does not join. DeepSpeed's own zero_to_fp32.py, beside "
            "each of its checkpoints, does: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR. What it writes, the weights in fp32, "
            "labkit migrates. Optimizer state stays behind.",
        )

"""Know DeepSpeed's ZeRO partitions by DeepSpeed's own keys. labkit does not join them; a tool of DeepSpeed does."""

from __future__ import annotations

from labkit.checkpoint.errors import RankDivergenceError
from labkit.checkpoint.model import Checkpoint
from labkit.checkpoint.wording import listed

#: Under these keys a rank has its partition of the flattened fp32 parameters: stages 1 and 2, stage 3.
_PARTITIONS = frozenset({"single_partition_of_fp32_groups", "fp32_flat_groups"})
_SHAPES = "param_shapes"


def refuse_partitions(checkpoint: Checkpoint, part: Checkpoint) -> None:
    """Raise :class:`RankDivergenceError` where what is copied has ZeRO partitions, or what stage 3 leaves in parameters' places.

    Args:
        checkpoint: The checkpoint.
        part: It without what is left out.
    """
    keys = [key for key, entry in part.tensors.items() if _PARTITIONS.intersection(map(str, entry.path))]
    problems = [f"{listed(keys, most=4)}: a rank's partition of the flattened parameters, and no whole tensor"] if keys else []
    shaped = any(_SHAPES in map(str, value.path) for value in checkpoint.values.values())
    empty = [entry.key for entry in part.section("model") if not entry.numel]
    problems += [f"{key} is empty, as ZeRO stage 3 leaves a parameter of which each rank has a part" for key in empty if shaped]
    if problems:
        raise RankDivergenceError(
            checkpoint.path,
            problems,
            advice="These are partitions of DeepSpeed's ZeRO, which labkit does not join. DeepSpeed's own zero_to_fp32.py, beside "
            "each of its checkpoints, does: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR. What it writes, the weights in fp32, "
            "labkit migrates. Optimizer state stays behind.",
        )

"""Detection, by trainers' own keys, of shards that do not record their position; only the program that made them can join them.

| key | trainer | meaning |
| --- | --- | --- |
| ``single_partition_of_fp32_groups``, ``fp32_flat_groups`` | DeepSpeed | ZeRO: a rank's partition of the flattened parameters |
| ``param_shapes`` beside empty tensors, or beside no weights at all | DeepSpeed | ZeRO stage 3: placeholders, or nothing |
| ``mp_world_size`` above 1 | DeepSpeed | tensor parallelism has cut the model |
| ``tensor_model_parallel_size`` and the like above 1, in ``args`` or in any dict | Megatron-LM | tensor, pipeline or expert \
parallelism has cut the model |

Tensors that record their position (DTensor) are joined regardless of such keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from labkit.checkpoint.errors import RankDivergenceError
from labkit.checkpoint.index.model import Checkpoint, Path_, ValueEntry
from labkit.checkpoint.pickles.pickle_records import Record
from labkit.checkpoint.wording import listed

_PARTITIONS = frozenset({"single_partition_of_fp32_groups", "fp32_flat_groups"})
_SHAPES = "param_shapes"
_JOIN = "Let the program that cut them join them"
_MEGATRON = (
    f"{_JOIN}, Megatron-LM's tools/checkpoint/convert.py with --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1"
)
#: Keys that give the number of parts but not their positions; with what each part holds and what can join them.
_CUTS = {
    "mp_world_size": ("tensor parallelism has cut the model, and each file holds shards of its tensors", _JOIN),
    "tensor_model_parallel_size": (
        "tensor parallelism has cut the model, and each file holds shards of its tensors",
        _MEGATRON,
    ),
    "pipeline_model_parallel_size": (
        "pipeline parallelism has cut the model, and each file holds some layers under numbers of its own",
        _MEGATRON,
    ),
    "expert_model_parallel_size": ("expert parallelism has cut the model, and each file holds some of its experts", _MEGATRON),
}


def refuse_shards(checkpoint: Checkpoint, part: Checkpoint) -> None:
    """Raise what :func:`shards_of_trainers` returns."""
    if (error := shards_of_trainers(checkpoint, part)) is not None:
        raise error


def shards_of_trainers(checkpoint: Checkpoint, part: Checkpoint) -> RankDivergenceError | None:
    """Return an error if, by this module's table, the entries to copy are parts of tensors or of a model; None if not.

    Args:
        checkpoint: The checkpoint.
        part: The checkpoint without the entries that are left out.
    """
    keys = [key for key, entry in part.tensors.items() if _PARTITIONS.intersection(map(str, entry.path))]
    problems = [f"{listed(keys, most=4)}: a rank's partition of the flattened parameters, not a whole tensor"] if keys else []
    shaped = any(_SHAPES in map(str, value.path) for value in checkpoint.values.values())
    named = {str(value.path[-1]) for value in part.values.values() if _SHAPES in map(str, value.path[:-1])}
    if named and named.isdisjoint(key for entry in checkpoint.tensors.values() for key in _tails(entry.path)):
        problems.append(f"{_SHAPES} names parameters, and the file has none of them, as ZeRO stage 3 leaves them out")
    empty = [entry.key for entry in part.section("model") if not entry.numel]
    problems += [f"{key} is empty, as ZeRO stage 3 leaves a parameter that is divided over the ranks" for key in empty if shaped]
    cuts: dict[str, int] = {}
    for value in checkpoint.values.values():
        for name, size in _sizes(value):
            cuts[name] = max(size, cuts.get(name, 1))
    model = list(part.section("model"))
    placed = any(len(entry.chunks) != 1 or entry.chunks[0].sizes != entry.shape for entry in model)
    if cuts and model and not placed:
        return RankDivergenceError(
            checkpoint.path,
            [f"{name} is {size}: {_CUTS[name][0]}" for name, size in cuts.items()],
            advice="labkit does not join them, since no file says where in the model they belong. "
            f"{_CUTS[next(iter(cuts))][1]}, or save them as DTensors.",
        )
    if problems:
        return RankDivergenceError(
            checkpoint.path,
            problems,
            advice="These are partitions of DeepSpeed's ZeRO, which labkit does not join. DeepSpeed's own zero_to_fp32.py, beside "
            "each of its checkpoints, does: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR. It writes the weights in fp32, "
            "which labkit migrates, but no optimizer state.",
        )
    return None


def _tails(path: Path_) -> Iterator[str]:
    """Yield an entry's name relative to each dict around it: ``a.b.w`` is ``w`` in ``a.b``."""
    for at in range(len(path)):
        yield ".".join(map(str, path[at:]))


def _sizes(value: ValueEntry) -> Iterator[tuple[str, int]]:
    """Yield each key and number above 1 in a value, in any rank's file, that says the model was split."""
    for content in (value.inline, *value.replicas.values()):
        pairs = content.state if isinstance(content, Record) else {str(value.path[-1]): content}
        for name in _CUTS.keys() & pairs.keys():
            if isinstance(pairs[name], int) and pairs[name] > 1:
                yield name, pairs[name]

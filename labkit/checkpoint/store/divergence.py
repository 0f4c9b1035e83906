"""Detection of values that should be equal on several ranks but differ, before one is saved and the rest are lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from labkit.base.plain_text import name_ranks
from labkit.checkpoint.errors import STATE, RankDivergenceError
from labkit.checkpoint.files.plain_tensors import to_cpu
from labkit.checkpoint.index.model import Path_
from labkit.checkpoint.index.names import flat_key, fqn_of
from labkit.checkpoint.pickles.values import digest
from labkit.checkpoint.state.state import Captured
from labkit.checkpoint.store.comm import Comm

# For everything but per-rank values: maps a key to its nested keys and a text with its shape and dtype (or "a value").
_Forms = dict[str, tuple[Path_, str]]
_ADVICE = {
    "else": "Wrap each rank's own values in PerRank(...).",
    "parameter": "Replicated weights that differ were initialised with different seeds, or not stepped together.",
    "buffer": "Buffers that each rank counts by itself, such as BatchNorm's, belong to their module: PerRank cannot hold them. "
    "Make them equal before the save: torch.nn.SyncBatchNorm keeps them equal, or broadcast them, for buffer in model.buffers(): "
    "dist.broadcast(buffer, 0). DDP's broadcast_buffers does that only as a forward pass begins. To keep each rank's own as well, "
    "save PerRank({name: buffer.clone() for name, buffer in model.named_buffers()}), made before the broadcast.",
}


def refuse_divergence(captured: Captured, comm: Comm) -> None:
    """Compare all keys across the ranks, and all values of which several ranks hold copies.

    The ranks first exchange digests, and compare single keys only if these differ. A key may exist on only some ranks (a pipeline's
    stages). A value that rank 0 lacks is marked to be written by the lowest rank that has it, because DCP would drop it.

    Raises:
        RankDivergenceError: Keys or their values differ; it names each key and the groups of ranks that agree.

    Ranks: collective. Blocks for a hash of the replicated data (about 10 GB/s on one core).
    """
    if comm.size == 1:
        return
    digests, forms = _digests(captured), _forms(captured)
    labels = sorted({label for label, _ in digests.values()})
    totals = {label: digest({key: total for key, (other, total) in digests.items() if other == label}) for label in labels}
    everyone = comm.gather((digest(forms), totals))
    if _agree([totals for _, totals in everyone]) and len({total for total, _ in everyone}) == 1:
        return
    _name_them(captured, digests, forms, comm)


def _forms(captured: Captured) -> _Forms:
    leaves = [leaf for leaf in captured.leaves.values() if not leaf.own]
    return {leaf.key: (leaf.path, "a value" if leaf.shape is None else f"{leaf.dtype} of shape {leaf.shape}") for leaf in leaves}


def _agree(totals: list[dict[str, Any]]) -> bool:
    seen: dict[str, Any] = {}
    return all(seen.setdefault(label, total) == total for part in totals for label, total in part.items())


def _name_them(captured: Captured, digests: Mapping[str, tuple[str, bytes]], forms: _Forms, comm: Comm) -> None:
    everyone = comm.gather((forms, digests, list(captured.objects)))
    problems = _of_names([theirs for theirs, _, _ in everyone], [objects for _, _, objects in everyone])
    for key in sorted({key for theirs, _, _ in everyone for key in theirs}):
        first = next(rank for rank, (theirs, _, _) in enumerate(everyone) if key in theirs)
        if first == comm.rank != 0 and captured.leaves[key].shape is None:
            captured.leaves[key] = replace(captured.leaves[key], own=True)
    for key in sorted({key for _, part, _ in everyone for key in part}):
        by_label: dict[str, dict[int, bytes]] = {}
        for rank, (_, part, _) in enumerate(everyone):
            if key in part:
                label, total = part[key]
                by_label.setdefault(label, {})[rank] = total
        for totals in by_label.values():
            camps = _camps(totals)
            if len(camps) > 1:
                listed = " and ".join(name_ranks(ranks) for ranks in camps.values())
                problems.setdefault(key, f"{key} differs between {listed}")
    if problems:
        raise RankDivergenceError(STATE, list(problems.values()), advice=_advice(captured, problems))


def _of_names(forms: Sequence[_Forms], objects: Sequence[list[Path_]]) -> dict[str, str]:
    """Return the problem with each key whose form or nesting differs between ranks.

    A name may exist on only some ranks. But an object's entries must have the same names on all ranks that have the object, because
    a load gives each of these ranks all the names.
    """
    problems: dict[str, str] = {}
    where: dict[str, dict[int, tuple[Path_, str]]] = {}
    for rank, theirs in enumerate(forms):
        for key, form in theirs.items():
            where.setdefault(key, {})[rank] = form
    paths = {path: key for key, found in where.items() for path, _ in found.values()}
    for key, found in sorted(where.items()):
        camps = _camps(found)
        if len(camps) > 1:
            listed = " and ".join(f"{form} at {path} on {name_ranks(ranks)}" for (path, form), ranks in camps.items())
            problems[key] = f"{key} has another shape, dtype or place on other ranks: {listed}"
            continue
        path = next(iter(camps))[0]
        for length in range(1, len(path)):
            if path[:length] in paths:
                problems[key] = f"{key} is on {name_ranks(found)}, but {paths[path[:length]]} is a value on other ranks"
            having = [rank for rank, theirs in enumerate(objects) if path[:length] in theirs]
            if not set(having) <= set(found):
                problems[key] = f"{key} is only on {name_ranks(found)}, but {name_ranks(having)} have the object that it belongs to"
    return problems


def _camps(by_rank: Mapping[int, Any]) -> dict[Any, list[int]]:
    camps: dict[Any, list[int]] = {}
    for rank, what in by_rank.items():
        camps.setdefault(what, []).append(rank)
    return camps


def _advice(captured: Captured, keys: Iterable[str]) -> str:
    """Return advice for the keys that differ: a module's parameters, its buffers, or anything else."""
    kinds = set()
    for key in keys:
        path = captured.leaves[key].path if key in captured.leaves else ()
        owner = next((prefix for prefix in captured.modules if path[: len(prefix)] == prefix), None)
        if owner is None:
            kinds.add("else")
        else:
            fqn = fqn_of(captured.modules[owner])
            buffers = {fqn(name) for name, _ in captured.modules[owner].named_buffers()}
            kinds.add("buffer" if flat_key(path[len(owner) :]) in buffers else "parameter")
    return "\n".join(text for kind, text in _ADVICE.items() if kind in kinds)


def _digests(captured: Captured) -> dict[str, tuple[str, bytes]]:
    """Return, for each entry on several ranks, the label of the ranks that must agree and the content's digest."""
    result = {}
    for key, leaf in captured.leaves.items():
        if leaf.own:
            continue
        if leaf.shape is None:
            result[key] = ("all", digest(leaf.value))
        elif key in captured.replicas:
            shards = [(*shard[:2], to_cpu(shard[2], copy=False)) for shard in leaf.shards]
            result[key] = (captured.replicas[key], digest(shards))
    return result

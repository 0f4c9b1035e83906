"""Find values that should be equal on several ranks and are not, before one of them is saved and the others are lost."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import xxhash

from labkit.checkpoint.dcp_writer import Leaf
from labkit.checkpoint.errors import STATE, RankDivergenceError
from labkit.checkpoint.ranks import Comm
from labkit.checkpoint.shards import to_cpu
from labkit.checkpoint.state import Captured
from labkit.ranks import format_ranks


def refuse_divergence(captured: Captured, comm: Comm) -> None:
    """Compare, across the ranks, all keys and everything that several ranks hold a copy of.

    One digest a rank is exchanged; only when digests differ are single keys compared. A key may be on some ranks only (a
    pipeline's stages). A value that rank 0 lacks is marked to be written by the lowest rank that has it: DCP would drop it.

    Raises:
        RankDivergenceError: Naming each key and the groups of ranks that agree.

    Ranks: collective. Blocks for a hash of the replicated data (about 10 GB/s on one core).
    """
    if comm.size == 1:
        return
    digests = _digests(captured)
    totals: dict[str, Any] = {}
    for label in sorted({label for label, _ in digests.values()}):
        summed = xxhash.xxh3_128()
        for key in sorted(key for key, (other, _) in digests.items() if other == label):
            summed.update(f"{key}={digests[key][1]};".encode())
        totals[label] = summed.hexdigest()
    keys = xxhash.xxh3_128_hexdigest("\n".join(_shared_keys(captured)).encode())
    everyone = comm.gather((keys, totals))
    if _agree([totals for _, totals in everyone]) and len({keys for keys, _ in everyone}) == 1:
        return
    _name_them(captured, digests, comm)


def _shared_keys(captured: Captured) -> list[str]:
    return sorted(f"{leaf.key} {leaf.shape} {leaf.dtype}" for leaf in captured.leaves.values() if not leaf.own)


def _agree(totals: list[dict[str, Any]]) -> bool:
    seen: dict[str, Any] = {}
    return all(seen.setdefault(label, digest) == digest for part in totals for label, digest in part.items())


def _name_them(captured: Captured, digests: Mapping[str, tuple[str, str]], comm: Comm) -> None:
    shared = {key.split(" ", 1)[0] for key in _shared_keys(captured)}
    described = {key: str((leaf.shape, leaf.dtype)) for key, leaf in captured.leaves.items() if key in shared}
    everyone = comm.gather((described, dict(digests)))
    problems = []
    for key in sorted({key for keys, _ in everyone for key in keys}):
        holders = [rank for rank, (keys, _) in enumerate(everyone) if key in keys]
        if len({everyone[rank][0][key] for rank in holders}) > 1:
            problems.append(f"{key} has another shape or dtype on other ranks")
        if holders[0] == comm.rank != 0 and captured.leaves[key].shape is None:
            captured.leaves[key] = replace(captured.leaves[key], own=True)
    for key in sorted({key for _, part in everyone for key in part}):
        by_label: dict[str, dict[str, list[int]]] = {}
        for rank, (_, part) in enumerate(everyone):
            if key in part:
                label, digest = part[key]
                by_label.setdefault(label, {}).setdefault(digest, []).append(rank)
        for groups in by_label.values():
            if len(groups) > 1:
                camps = " and ".join(
                    f"ranks {format_ranks(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}" for ranks in groups.values()
                )
                problems.append(f"{key} differs between {camps}")
    if problems:
        raise RankDivergenceError(
            STATE,
            problems,
            advice="Wrap what each rank has its own of in PerRank(...). Replicated weights that differ were "
            "initialised with different seeds.",
        )


def _camp(ranks: list[int]) -> str:
    return f"ranks {format_ranks(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"


def _digests(captured: Captured) -> dict[str, tuple[str, str]]:
    """Key to (the label of the ranks that must agree, the content's digest), for what several ranks hold."""
    result = {}
    for key, leaf in captured.leaves.items():
        if leaf.own:
            continue
        if leaf.shape is None:
            result[key] = ("all", _value_digest(leaf.value))
        elif key in captured.replicas:
            result[key] = (captured.replicas[key], _tensor_digest(leaf))
    return result


def _tensor_digest(leaf: Leaf) -> str:
    digest = xxhash.xxh3_128()
    for offsets, sizes, data in leaf.shards:
        digest.update(f"{offsets}{sizes}{leaf.dtype}".encode())
        flat = to_cpu(data, copy=False).contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    return digest.hexdigest()


def _value_digest(value: Any) -> str:
    # repr() of plain data is the same for equal data on every rank; a pickle need not be, since it notes which strings
    # are one object. What has only an address for a repr goes by its pickle.
    text = repr(value)
    data = text.encode() if " at 0x" not in text else pickle.dumps(value)
    return xxhash.xxh3_128_hexdigest(data)

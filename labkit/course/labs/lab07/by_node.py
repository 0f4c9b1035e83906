"""Exercise 2 of notebook 07: an all-reduce that sends as little as possible between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose
from typing import Any

from labkit.course.labs.checks import Pool, ask, from_cell, refuse, require_on_ranks, run_on_ranks
from labkit.errors import ExerciseError

_NUMBERS_PER_PIECE = 6
_RINGS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Tried:
    """One rank's observations.

    Attributes:
        result: The numbers that the learner's function returned; None if it did not return a tensor.
        target: The sum over all ranks.
        node_sum: The sum over this rank's node.
        between_bytes: The bytes that this rank sent to other nodes.
        between_kinds: The kinds of collectives that sent them.
        strange: Whether the function used a group that does not belong to the mesh.
        size_bytes: Bytes of the tensor.
    """

    result: list[float] | None
    target: list[float]
    node_sum: list[float]
    between_bytes: float
    between_kinds: frozenset[str]
    strange: bool
    size_bytes: int


def check_all_reduce_by_node(pool: Pool, num_nodes: int) -> str:
    """Exercise 2: ``all_reduce_by_node(tensor, mesh)`` returns the sum over all ranks and sends little between nodes.

    Args:
        pool: The pool; ``all_reduce_by_node`` is defined on its ranks.
        num_nodes: The number of nodes, real or simulated, with equally many ranks on each.

    Returns:
        A line with the bytes.

    Raises:
        ExerciseError: A rank gets a different result, or too much is sent between nodes; the message shows the difference.

    Ranks: controller.
    """
    require_on_ranks(pool, "all_reduce_by_node")
    seen = run_on_ranks(pool, _try, num_nodes, timeout_s=60)
    for rank, tried in seen.items():
        if tried.result is None:
            raise ExerciseError(f"all_reduce_by_node did not return a tensor on rank {rank}. It has to return the sum.")
        if tried.result != tried.target:
            _refuse_result(rank, tried, pool.world_size, num_nodes)
    if any(tried.strange for tried in seen.values()):
        raise ExerciseError("all_reduce_by_node uses a process group that is not the mesh's, so its bytes cannot be counted.")
    size = seen[0].size_bytes
    # For each piece, one rank on every node takes part in a ring over the nodes.
    target = 2 * size * (num_nodes - 1)
    between = round(sum(tried.between_bytes for tried in seen.values()))
    if between > target:
        per_node = pool.world_size // num_nodes
        refuse(
            f"The sum is right, and {between:,} bytes go between nodes for a tensor of {size:,}: {between - target:,} too many.",
            f"at most {target:,} bytes.",
            _hint_for_too_much(seen[0], whole=between >= target * per_node and per_node > 1),
        )
    return f"Solved: the sum is right on every rank, and {between:,} bytes went between nodes for a tensor of {size:,}."


def _hint_for_too_much(tried: Tried, *, whole: bool) -> str:
    if whole and tried.between_kinds >= {"reduce_scatter", "all_gather"}:
        return "The axes are the wrong way round: you cut between the nodes. Cut over local, inside a node, and reduce over node."
    if whole:
        return "Every rank of a node sends the whole sum to the other nodes. Let each send one piece of it."
    return "A ring over all ranks ignores nodes. Reduce inside first, so that each rank has one piece of its node's sum."


def _refuse_result(rank: int, tried: Tried, world_size: int, num_nodes: int) -> None:
    result = tried.result or []
    if len(result) != len(tried.target):
        refuse(
            f"all_reduce_by_node returned {len(result)} numbers on rank {rank}.",
            f"{len(tried.target)}, the sum of whole tensors.",
            "A rank has its piece only. The pieces of a node have to be put together again: which collective does that?",
        )
    wrong = sum(one != other for one, other in zip(result, tried.target, strict=True))
    hint = "Add up inside the node, between the nodes, and put the pieces together, each exactly once."
    if result == tried.node_sum:
        hint = "This is the sum of this node. The other nodes are missing."
    elif sorted(result) == sorted(tried.target):
        hint = "All numbers are there, in another order: whose piece comes first?"
    for factor in {world_size, world_size // num_nodes, num_nodes} - {1}:
        if _is_multiple(tried.target, result, factor):
            hint = f"All numbers are too small by a factor of {factor}: return the sum, not the mean."
        elif _is_multiple(result, tried.target, factor):
            hint = f"All numbers are too large by a factor of {factor}: something is added up more than once."
    refuse(f"{wrong} of {len(result)} numbers are wrong on rank {rank}.", "the sum over all ranks.", hint)


def _is_multiple(large: list[float], small: list[float], factor: int) -> bool:
    return all(isclose(one, factor * other, rel_tol=1e-6) for one, other in zip(large, small, strict=True))


def _try(num_nodes: int) -> Tried:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from labkit.spmd.trace.collectives import count_collectives

    rank, world_size, device = dist.get_rank(), dist.get_world_size(), from_cell("device")
    per_node = world_size // num_nodes
    mesh = init_device_mesh(device.type, (num_nodes, per_node), mesh_dim_names=("node", "local"))
    numbers = torch.arange(1.0, 1 + _NUMBERS_PER_PIECE * per_node)
    shares = [numbers * (other + 1) for other in range(world_size)]
    first = rank // per_node * per_node
    known: list[Any] = [mesh.get_group("node"), mesh.get_group("local"), dist.group.WORLD]
    members = {group.group_name: dist.get_process_group_ranks(group) for group in known}
    with count_collectives() as log:
        result = ask(from_cell("all_reduce_by_node"), shares[rank].clone().to(device), mesh, case=f"{numbers.numel()} numbers")
    between, kinds, strange = 0.0, set(), False
    for call in log.calls:
        ranks = members.get(call.group, [])
        strange |= not ranks and call.group_size > 1
        nodes = [member // per_node for member in ranks]
        kinds |= {call.kind} if len(set(nodes)) > 1 else set()
        if call.kind in _RINGS:
            following = ranks[(ranks.index(rank) + 1) % len(ranks)] if rank in ranks else rank
            between += call.sent_bytes if following // per_node != rank // per_node else 0
        elif ranks:
            # In a tree over the nodes, the tensor is sent to each other node once.
            between += call.size_bytes * (len(set(nodes)) - 1) / len(ranks)
    return Tried(
        result.detach().cpu().flatten().tolist() if isinstance(result, torch.Tensor) else None,
        sum(shares).tolist(),  # type: ignore[union-attr]
        sum(shares[first : first + per_node]).tolist(),  # type: ignore[union-attr]
        between,
        frozenset(kinds),
        strange,
        numbers.numel() * numbers.element_size(),
    )

"""The shards of a model or state dict that a rank actually holds, as plain records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labkit.checkpoint.state.shards import box_of
from labkit.spmd.shards.records import Chunk, ShardRecord
from labkit.spmd.shards.tree import leaves, path_text


def shard_table(state: nn.Module | Mapping[str, Any]) -> list[ShardRecord]:
    """List the part of each tensor that this rank holds, as read from the real tensors.

    Chunks come from the `labkit.checkpoint` code that also saves them. So uneven, empty and strided (two-dimensional) shards are
    right, and a live model's table matches its checkpoint's.

    Args:
        state: A module (parameters, then buffers) or a nested mapping such as an optimizer's state dict. Leaves that are not
            tensors are left out; ShardedTensors of FSDP1 are read too.

    Returns:
        One record per tensor, in the state's order, without torch objects. A tensor that occurs again under another name (tied
        weights) has ``tied_to`` set.

    Ranks: local.
    """
    names: dict[int, str] = {}
    records = []
    # Names are keyed by id, so keep every tensor alive until the end; then no id is reused.
    tensors = list(_tensors(state))
    for name, tensor in tensors:
        first = names.setdefault(id(tensor), name)
        records.append(_record(name, tensor, None if first == name else first))
    return records


def _tensors(state: nn.Module | Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(state, nn.Module):
        yield from state.named_parameters(remove_duplicate=False)
        yield from state.named_buffers(remove_duplicate=False)
        return
    for path, leaf in leaves(state):
        if isinstance(leaf, Tensor) or hasattr(leaf, "local_shards"):
            yield path_text(path), leaf


def _record(name: str, tensor: Any, tied_to: str | None) -> ShardRecord:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        local = tensor.to_local()
        return ShardRecord(
            name,
            shape,
            dtype,
            placements=tuple(repr(placement) for placement in tensor.placements),
            mesh_shape=tuple(mesh.shape),
            mesh_axes=tuple(mesh.mesh_dim_names or [""] * mesh.ndim),
            coordinate=None if coordinate is None else tuple(coordinate),
            chunks=() if coordinate is None else _chunks(tensor),
            local_bytes=local.numel() * local.element_size(),
            tied_to=tied_to,
        )
    if isinstance(tensor, Tensor):
        whole = (Chunk((0,) * len(shape), shape),)
        return ShardRecord(name, shape, dtype, (), (), (), None, whole, tensor.numel() * tensor.element_size(), tied_to)
    return _sharded_tensor_record(name, tensor, shape, dtype, tied_to)


def _chunks(tensor: DTensor) -> tuple[Chunk, ...]:
    if any(placement.is_partial() for placement in tensor.placements):
        # A partial sum has the whole shape on every rank, and torch assigns it no box.
        return (Chunk((0,) * tensor.ndim, tuple(tensor.shape)),)
    chunk = Chunk(*box_of(tensor))
    return (chunk,) if chunk.numel else ()


def _sharded_tensor_record(name: str, tensor: Any, shape: tuple[int, ...], dtype: str, tied_to: str | None) -> ShardRecord:
    shards = tensor.local_shards()
    chunks = tuple(Chunk(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)) for shard in shards)
    local_bytes = sum(shard.tensor.numel() * shard.tensor.element_size() for shard in shards)
    return ShardRecord(name, shape, dtype, ("ShardedTensor",), (), (), None, chunks, local_bytes, tied_to)

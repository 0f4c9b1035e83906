"""The names that a checkpoint's pickle may contain. None of them is imported: each becomes an inert record.

A name is allowed by module and qualified name together: allowing a module or class does not allow what is inside it. Names that
only older versions of torch write stay on the list, because files that contain them exist.
"""

from __future__ import annotations

from collections.abc import Iterable

_SHARD = "torch.distributed._shard"
_DCP = "torch.distributed.checkpoint"
_DTENSOR = "torch.distributed.tensor"
_OLD_DTENSOR = "torch.distributed._tensor"  # up to torch 2.4
_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")


def _in(module: str, *names: str) -> set[tuple[str, str]]:
    return {(module, name) for name in names}


def _enum(module: str, name: str, members: Iterable[str]) -> set[tuple[str, str]]:
    """Return an enum's name and its members'. Python 3.11 pickles a member as an attribute of the class."""
    return _in(module, name, *(f"{name}.{member}" for member in members))


RECORD_NAMES: frozenset[tuple[str, str]] = frozenset(
    # DCP's .metadata.
    _in(f"{_DCP}.metadata", "Metadata", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties")
    | _enum(f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING", _FORMATS)
    # FSDP1's sharded tensors.
    | _in(f"{_SHARD}.sharded_tensor.api", "ShardedTensor", "ShardedTensor.ProcessGroupState")
    | _in(f"{_SHARD}.sharded_tensor.metadata", "ShardedTensorMetadata", "TensorProperties")
    | _enum(f"{_SHARD}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING", _FORMATS)
    | _in(f"{_SHARD}.sharded_tensor.shard", "Shard")
    | _in(f"{_SHARD}.metadata", "ShardMetadata")
    | _in(f"{_SHARD}.sharding_spec.api", "EnumerableShardingSpec", "DevicePlacementSpec")
    | _in(f"{_SHARD}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec")
    | _in("torch.distributed.remote_device", "_remote_device")
    # DTensor, its specification and its placements.
    | _in(_DTENSOR, "DTensor")
    | _in(f"{_DTENSOR}._api", "DTensor")
    | _in(f"{_DTENSOR}._dtensor_spec", "DTensorSpec", "TensorMeta", "ShardOrderEntry")
    | _in(f"{_DTENSOR}.placement_types", "Shard", "_StridedShard", "Replicate", "Partial", "_MaskPartial")
    | _in(f"{_DTENSOR}._ops._embedding_ops", "_MaskPartial")
    | _in(f"{_DTENSOR}._shards_wrapper", "LocalShardsWrapper")
    | _in(_OLD_DTENSOR, "DTensor")
    | _in(f"{_OLD_DTENSOR}.api", "DTensor")
    | _in(
        f"{_OLD_DTENSOR}.placement_types", "DTensorSpec", "TensorMeta", "Shard", "_StridedShard", "Replicate", "Partial", "_Partial"
    )
    | _in(f"{_OLD_DTENSOR}.ops.embedding_ops", "_MaskPartial")
    | _in(f"{_OLD_DTENSOR}.ops._embedding_ops", "_MaskPartial")
    | _in(f"{_OLD_DTENSOR}._shards_wrapper", "LocalShardsWrapper")
    | _in(f"{_OLD_DTENSOR}.device_mesh", "DeviceMesh")
    # Device meshes and their layouts: one class up to torch 2.12, a layout of axes from 2.13 on.
    | _in("torch.distributed.device_mesh", "DeviceMesh")
    | _in("torch.distributed._mesh_layout", "_MeshLayout", "_FlatLayout")
    # Tensors that are described but not read.
    | _in("torch", "per_tensor_affine", "per_channel_affine", "per_channel_affine_float_qparams")
    | _in("torch._dynamo.decorators", "_DimRange")
    | _in("torch.masked.maskedtensor.core", "MaskedTensor")
    | _in("torch.nested._internal.nested_tensor", "NestedTensor")
    # Values.
    | _in("argparse", "Namespace")
    | _in("builtins", "range", "slice")
    | _in("collections", "defaultdict")  # its factory is never called; with a known factory it becomes a dict
    | _in("datetime", "date", "datetime", "timedelta")
    | _in("numpy", "dtype", "ndarray")
    | _in("pathlib", "Path", "PosixPath", "PurePosixPath", "WindowsPath")
    # The same classes in Python 3.13. DCP stores a checkpoint's own path, so every DCP checkpoint names one of them.
    | _in("pathlib._local", "Path", "PosixPath", "PurePosixPath", "WindowsPath")
    | _in("torch", "Tensor")
    | _in("torch.nn.parameter", "Parameter")
    | _in("torch.torch_version", "TorchVersion")
    | _in("types", "SimpleNamespace")
)

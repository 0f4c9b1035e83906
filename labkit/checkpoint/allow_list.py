"""The names that a checkpoint's pickle may ask for without being refused. None of them is called: each becomes an inert record."""

from __future__ import annotations

# Plain data classes that torch writes into checkpoints. Whatever the name, reading makes an inert record.
RECORD_MODULES = (
    "torch.distributed._shard.",
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed.device_mesh",
    "torch.distributed._mesh_layout",
    "torch.distributed.remote_device",
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)
RECORD_NAMES = {
    ("argparse", "Namespace"),
    ("builtins", "range"),
    ("builtins", "slice"),
    ("collections", "defaultdict"),
    ("datetime", "date"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    # Where Python 3.13 has them. DCP stores the checkpoint's own path, so each of its checkpoints names one.
    ("pathlib._local", "Path"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "PurePosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("torch", "Tensor"),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
    ("torch._utils", "_rebuild_device_tensor_from_numpy"),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"),
    ("torch._utils", "_rebuild_nested_tensor"),
    ("torch._utils", "_rebuild_qtensor"),
    ("torch._utils", "_rebuild_sparse_tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.torch_version", "TorchVersion"),
    ("types", "SimpleNamespace"),
}

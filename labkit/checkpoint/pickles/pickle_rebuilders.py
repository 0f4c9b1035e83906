"""Stand-ins for torch's functions that rebuild tensors from a pickle; each returns a description of the tensor."""

from __future__ import annotations

from pickle import UnpicklingError
from typing import Any

import torch

from labkit.checkpoint.pickles.pickle_records import (
    QUANTIZED_STORAGES,
    STORAGES,
    Class,
    Function,
    Lazy,
    Record,
    StorageRef,
    TensorRef,
    UnsupportedTensor,
    is_dtensor,
    is_sharded_tensor,
    name_text,
    sizes_text,
)

# Classes that add nothing to the tensor they are made from.
_PLAIN_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")


def _shape(size: Any) -> tuple[int, ...]:
    shape = tuple(size) if isinstance(size, tuple | list) else (None,)
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
        raise UnpicklingError("a tensor whose size is not a sequence of numbers")
    return shape


def storage(kind: Any, key: Any, numel: Any) -> StorageRef:
    """Return the reference to a storage that a pickle names."""
    if not isinstance(kind, Function) or not isinstance(key, str) or type(numel) is not int or not 0 <= numel < 1 << 63:
        raise UnpicklingError("a storage that cannot be read")
    return StorageRef(key, kind.call(), numel)


def _tensor(data: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Any:
    # _rebuild_tensor_v2: (requires_grad, hooks[, metadata]).
    return _view(data, getattr(data, "dtype", None), offset, size, stride, rest[2] if len(rest) > 2 else None)


def _tensor_v3(data: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None) -> Any:
    return _view(data, dtype, offset, size, stride, metadata)


def _view(data: Any, dtype: Any, offset: Any, size: Any, stride: Any, metadata: Any) -> Any:
    if not isinstance(data, StorageRef) or not isinstance(dtype, torch.dtype):
        raise UnpicklingError("a tensor without a storage or a dtype")
    shape, strides, (start,) = _shape(size), _shape(stride), _shape((offset,))
    if len(shape) != len(strides):
        raise UnpicklingError("a tensor with a different number of strides than of dims")
    flags = metadata or {}
    if not isinstance(flags, dict) or not all(value is True or value is False for value in flags.values()):
        raise UnpicklingError("a tensor with metadata that are not flags")
    if flags.keys() - {"conj", "neg"}:
        return UnsupportedTensor(f"tensor {sizes_text(shape)} {name_text(dtype)} with the flags {', '.join(map(str, flags))[:60]}")
    lazy = Lazy(flags.get("conj", False), flags.get("neg", False))
    if lazy.conj and not dtype.is_complex:
        raise UnpicklingError(f"a conjugate of {name_text(dtype)}")
    return TensorRef(data, dtype, shape, strides, start, lazy)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    # torch._tensor._rebuild_from_type_v2: a subclass, or a tensor with attributes (which are dropped).
    if not (isinstance(function, Function) and isinstance(kind, Class) and isinstance(arguments, tuple)):
        raise UnpicklingError("a tensor subclass that is not rebuilt by a function of torch")
    built = function.call(*arguments)
    if isinstance(built, Record):
        built.set_state(state)
        known = is_dtensor(built) or is_sharded_tensor(built)
        return built if known else UnsupportedTensor(f"tensor subclass {kind.name} {sizes_text(_shape(built.args[1]))}")
    if isinstance(built, TensorRef) and kind.name not in _PLAIN_TENSORS:
        return UnsupportedTensor(f"tensor subclass {kind.name} {sizes_text(built.shape)} {name_text(built.dtype)}")
    return built


def _wrapper(kind: Any, dtype: Any, size: Any, *_: Any) -> Record:
    if not isinstance(kind, Class) or not isinstance(dtype, torch.dtype):
        raise UnpicklingError("a tensor subclass that is not a class")
    return Record(kind, (dtype, _shape(size)))


def _quantized(data: Any, offset: Any, size: Any, *_: Any) -> UnsupportedTensor:
    return UnsupportedTensor(f"quantized tensor {sizes_text(_shape(size))} {name_text(getattr(data, 'dtype', 'unknown'))}")


def _sparse(layout: Any, parts: Any) -> UnsupportedTensor:
    size = next((part for part in reversed(parts) if isinstance(part, tuple)), ()) if isinstance(parts, tuple) else ()
    kind = layout if isinstance(layout, str) and len(layout) < 40 else "unknown"
    return UnsupportedTensor(f"sparse tensor {sizes_text(_shape(size))} ({name_text(kind)})")


def _nested(*_: Any) -> UnsupportedTensor:
    return UnsupportedTensor("nested tensor (torch.nested)")


def _jagged(*_: Any) -> UnsupportedTensor:
    return UnsupportedTensor("jagged tensor (torch.nested)")


def _meta(dtype: Any, size: Any, *_: Any) -> UnsupportedTensor:
    return UnsupportedTensor(f"meta tensor {sizes_text(_shape(size))} {name_text(dtype)}, which has no data")


def _on_device(data: Any, dtype: Any, *_: Any) -> Any:
    same = isinstance(data, TensorRef) and data.dtype == dtype
    return data if same else UnsupportedTensor(f"tensor of another device, of dtype {name_text(dtype)}")


def _layout(name: Any) -> str:
    return str(name)[:40]


REBUILDERS: dict[tuple[str, str], Function] = {
    ("torch._utils", "_rebuild_tensor"): Function(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Function(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Function(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): Function(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Function(_parameter),
    ("torch._utils", "_rebuild_wrapper_subclass"): Function(_wrapper),
    ("torch._utils", "_rebuild_qtensor"): Function(_quantized),
    ("torch._utils", "_rebuild_sparse_tensor"): Function(_sparse),
    ("torch._utils", "_rebuild_nested_tensor"): Function(_nested),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): Function(_meta),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): Function(_on_device),
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): Function(_on_device),
    ("torch._tensor", "_rebuild_from_type_v2"): Function(_from_type),
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): Function(_jagged),
    ("torch.serialization", "_get_layout"): Function(_layout),
}
_STORAGE_KINDS = {name: Function(lambda dtype=dtype: dtype) for name, dtype in {**STORAGES, **QUANTIZED_STORAGES}.items()}


def storage_kind(module: str, name: str) -> Function | None:
    """Return the stand-in for a class of storages; calling it gives the dtype."""
    return _STORAGE_KINDS.get(name) if module in ("torch", "torch.cuda", "torch.storage") else None

"""What stands for tensors in a pickle that is read without running it: a description of each, and where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pickle import UnpicklingError
from typing import Any

import torch

from labkit.checkpoint.pickle_records import Class, Function, Record

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": None,
}
_QUANTIZED_STORAGES = {
    "QInt8Storage": torch.qint8,
    "QUInt8Storage": torch.quint8,
    "QInt32Storage": torch.qint32,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
}
QUANTIZED = frozenset(_QUANTIZED_STORAGES.values())
# Classes that add nothing to the tensor that they are made of.
_PLAIN_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """A storage that a torch.save archive keeps in a record of its own.

    Attributes:
        key: The record's name under ``data/``.
        dtype: The element type, or None for an untyped storage.
        numel: Elements, or bytes for an untyped storage.
    """

    key: str
    dtype: torch.dtype | None
    numel: int

    def fits(self, length: int) -> bool:
        """Whether a record of so many bytes is the whole storage. A few bytes may be left over at its end."""
        item = 1 if self.dtype is None else self.dtype.itemsize
        return 0 <= length - self.numel * item < item


@dataclass(frozen=True, slots=True)
class Lazy:
    """What is still to be done to a tensor's bytes: torch saves a view as the bytes of its base and these two bits.

    Attributes:
        conj: The values are the complex conjugates of what is stored.
        neg: They are the negatives.
    """

    conj: bool = False
    neg: bool = False

    def __bool__(self) -> bool:
        return self.conj or self.neg

    def resolve(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor that is stored so."""
        if self.conj:
            stored = stored.conj().resolve_conj()
        return stored.neg() if self.neg else stored


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor described and not built: a view of a storage."""

    storage: StorageRef
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    lazy: Lazy = Lazy()

    @property
    def size_bytes(self) -> int:
        """The bytes of its values, which may be far more than those of its storage: strides may be 0."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def view(self) -> tuple[Any, ...]:
        """What two references to the same values have in common."""
        return self.storage.key, self.dtype, self.shape, self.strides, self.offset, self.lazy

    def __repr__(self) -> str:
        return f"<tensor {_sizes(self.shape)} {_name(self.dtype)}>"


@dataclass(frozen=True, slots=True, eq=False)
class UnsupportedTensor:
    """A tensor that labkit describes and does not read.

    Attributes:
        what: What it is: ``quantized tensor 3x4 qint8``.
    """

    what: str

    def __repr__(self) -> str:
        return f"<{self.what}, not supported>"


def is_tensor(item: Any) -> bool:
    """Whether something read from a pickle is a tensor, also one that is not supported."""
    return isinstance(item, TensorRef | UnsupportedTensor) or is_dtensor(item) or is_sharded_tensor(item)


def is_dtensor(item: Any) -> bool:
    """Whether something read from a pickle is a DTensor."""
    return isinstance(item, Record) and isinstance(item.state.get("_local_tensor"), TensorRef)


def is_sharded_tensor(item: Any) -> bool:
    """Whether something read from a pickle is one of FSDP1's sharded tensors."""
    return isinstance(item, Record) and item.name == "torch.distributed._shard.sharded_tensor.api.ShardedTensor"


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(size: Any) -> tuple[int, ...]:
    shape = tuple(size) if isinstance(size, tuple | list) else (None,)
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
        raise UnpicklingError("a tensor whose size is no row of numbers")
    return shape


def storage(kind: Any, key: Any, numel: Any) -> StorageRef:
    """Return a storage that a pickle refers to."""
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
        raise UnpicklingError("a tensor with another number of strides than of dims")
    flags = metadata or {}
    if not isinstance(flags, dict) or not all(value is True or value is False for value in flags.values()):
        raise UnpicklingError("a tensor with metadata that are no flags")
    if flags.keys() - {"conj", "neg"}:
        return UnsupportedTensor(f"tensor {_sizes(shape)} {_name(dtype)} with the flags {', '.join(map(str, flags))[:60]}")
    lazy = Lazy(flags.get("conj", False), flags.get("neg", False))
    if lazy.conj and not dtype.is_complex:
        raise UnpicklingError(f"a conjugate of {_name(dtype)}")
    return TensorRef(data, dtype, shape, strides, start, lazy)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    # torch._tensor._rebuild_from_type_v2: a subclass, or a tensor with attributes, which are left out.
    if not (isinstance(function, Function) and isinstance(kind, Class) and isinstance(arguments, tuple)):
        raise UnpicklingError("a tensor subclass that is rebuilt by something that is no function of torch")
    built = function.call(*arguments)
    if isinstance(built, Record):
        built.set_state(state)
        known = is_dtensor(built) or is_sharded_tensor(built)
        return built if known else UnsupportedTensor(f"tensor subclass {kind.name} {_sizes(_shape(built.args[1]))}")
    if isinstance(built, TensorRef) and kind.name not in _PLAIN_TENSORS:
        return UnsupportedTensor(f"tensor subclass {kind.name} {_sizes(built.shape)} {_name(built.dtype)}")
    return built


def _wrapper(kind: Any, dtype: Any, size: Any, *_: Any) -> Record:
    if not isinstance(kind, Class) or not isinstance(dtype, torch.dtype):
        raise UnpicklingError("a tensor subclass that is no class")
    return Record(kind, (dtype, _shape(size)))


def _quantized(data: Any, offset: Any, size: Any, *_: Any) -> UnsupportedTensor:
    return UnsupportedTensor(f"quantized tensor {_sizes(_shape(size))} {_name(getattr(data, 'dtype', 'unknown'))}")


def _sparse(layout: Any, parts: Any) -> UnsupportedTensor:
    size = next((part for part in reversed(parts) if isinstance(part, tuple)), ()) if isinstance(parts, tuple) else ()
    kind = layout if isinstance(layout, str) and len(layout) < 40 else "unknown"
    return UnsupportedTensor(f"sparse tensor {_sizes(_shape(size))} ({_name(kind)})")


def _nested(*_: Any) -> UnsupportedTensor:
    return UnsupportedTensor("nested tensor (torch.nested)")


def _jagged(*_: Any) -> UnsupportedTensor:
    return UnsupportedTensor("jagged tensor (torch.nested)")


def _meta(dtype: Any, size: Any, *_: Any) -> UnsupportedTensor:
    return UnsupportedTensor(f"meta tensor {_sizes(_shape(size))} {_name(dtype)}, which has no data")


def _on_device(data: Any, dtype: Any, *_: Any) -> Any:
    same = isinstance(data, TensorRef) and data.dtype == dtype
    return data if same else UnsupportedTensor(f"tensor of another device, of dtype {_name(dtype)}")


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
_STORAGE_KINDS = {name: Function(lambda dtype=dtype: dtype) for name, dtype in {**STORAGES, **_QUANTIZED_STORAGES}.items()}


def storage_kind(module: str, name: str) -> Function | None:
    """Return what stands for a class of storages; calling it gives the dtype."""
    return _STORAGE_KINDS.get(name) if module in ("torch", "torch.cuda", "torch.storage") else None

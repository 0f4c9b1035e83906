"""Stand-ins for the objects of a pickle that is read without running it: class records, and descriptions of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pickle import UnpicklingError
from typing import Any

import torch

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
QUANTIZED_STORAGES = {
    "QInt8Storage": torch.qint8,
    "QUInt8Storage": torch.quint8,
    "QInt32Storage": torch.qint32,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
}
QUANTIZED = frozenset(QUANTIZED_STORAGES.values())


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """A storage that a torch.save archive keeps in a separate record.

    Attributes:
        key: The record's name under ``data/``.
        dtype: The element type, or None for an untyped storage.
        numel: Elements, or bytes for an untyped storage.
    """

    key: str
    dtype: torch.dtype | None
    numel: int

    def fits(self, length: int) -> bool:
        """Return whether a record of this many bytes is the whole storage. It may have a few extra bytes at the end."""
        item = 1 if self.dtype is None else self.dtype.itemsize
        return 0 <= length - self.numel * item < item


@dataclass(frozen=True, slots=True)
class Lazy:
    """Operations still to be applied to a tensor's bytes: torch saves a view as its base's bytes and these two bits.

    Attributes:
        conj: The values are the complex conjugates of the stored ones.
        neg: The values are the negatives of the stored ones.
    """

    conj: bool = False
    neg: bool = False

    def __bool__(self) -> bool:
        return self.conj or self.neg

    def resolve(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor that is stored with these bits."""
        if self.conj:
            stored = stored.conj().resolve_conj()
        return stored.neg() if self.neg else stored


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor that is described but not built: a view of a storage."""

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
        """A key that is equal for all references to the same values."""
        return self.storage.key, self.dtype, self.shape, self.strides, self.offset, self.lazy

    def __repr__(self) -> str:
        return f"<tensor {sizes_text(self.shape)} {name_text(self.dtype)}>"


@dataclass(frozen=True, slots=True, eq=False)
class UnsupportedTensor:
    """A tensor that labkit describes but does not read.

    Attributes:
        what: A description: ``quantized tensor 3x4 qint8``.
    """

    what: str

    def __repr__(self) -> str:
        return f"<{self.what}, not supported>"


class IntKey(int):
    """An int that is a key of a dict. Any other int in a path is a position in a list."""


class Class:
    """A class that a pickle names. Calling it makes a :class:`Record`; no code of the class itself runs.

    Attributes:
        module, qualname: Its name.
        opaque: Whether it is outside the allow-list.
    """

    __slots__ = ("module", "opaque", "qualname")

    def __init__(self, module: str, qualname: str, *, opaque: bool) -> None:
        self.module, self.qualname, self.opaque = module, qualname, opaque

    @property
    def name(self) -> str:
        return f"{self.module}.{self.qualname}"

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Record:
    """An object of a class, kept only as arguments, state and items; a mapping's items are alternating keys and values."""

    __slots__ = ("args", "items", "kind", "state")

    def __init__(self, kind: Class, args: tuple[Any, ...]) -> None:
        self.kind, self.args = kind, args
        self.state: dict[str, Any] = {}
        self.items: list[Any] = []

    @property
    def name(self) -> str:
        return self.kind.name

    def set_state(self, state: Any) -> None:
        """Take the state that a pickle sets, but only once: what a second state does depends on the class."""
        if self.state:
            raise UnpicklingError(f"it sets the state of a {self.name} twice")
        # Slotted dataclasses and enums pickle their state as (dict, slots), everything else that torch writes as one dict.
        if isinstance(state, tuple) and len(state) == 2 and all(part is None or isinstance(part, dict) for part in state):
            state = {**(state[0] or {}), **(state[1] or {})}
        self.state = state if isinstance(state, dict) else {"state": state}

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Function:
    """A function of this package that a pickle may call. It has no attributes that a pickle could set."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


def is_tensor(item: Any) -> bool:
    """Return whether something read from a pickle is a tensor, including unsupported ones."""
    return isinstance(item, TensorRef | UnsupportedTensor) or is_dtensor(item) or is_sharded_tensor(item)


def is_dtensor(item: Any) -> bool:
    """Return whether something read from a pickle is a DTensor."""
    return isinstance(item, Record) and isinstance(item.state.get("_local_tensor"), TensorRef)


def is_sharded_tensor(item: Any) -> bool:
    """Return whether something read from a pickle is one of FSDP1's sharded tensors."""
    return isinstance(item, Record) and item.name == "torch.distributed._shard.sharded_tensor.api.ShardedTensor"


def sizes_text(shape: tuple[int, ...]) -> str:
    """Return ``2x3`` for (2, 3)."""
    return "x".join(map(str, shape)) or "scalar"


def name_text(dtype: object) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")

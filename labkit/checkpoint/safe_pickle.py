"""Read the pickles in checkpoints without running anything that they name.

A pickle is a small program: it may name any importable function and call it. Here no name is ever imported. Each name on
the allow-list stands for an inert record of this module that only remembers its arguments; any other name refuses the
file (or is kept as an opaque record when the caller wants to look on). See the warning in :mod:`pickle`, and
:func:`torch.load` with ``weights_only=True`` for torch's own restricted reader, which builds real tensors and knows
neither ``.metadata`` nor FSDP1's sharded tensors.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from labkit.checkpoint.allow_list import RECORD_MODULES, RECORD_NAMES
from labkit.checkpoint.errors import CheckpointFormatError, UnsafeCheckpointError

Unknown = Literal["refuse", "opaque"]
_PRESCAN_BYTES = 1 << 20  # pickletools costs about 1 us a byte, so only indices up to this size are walked beforehand
_MAX_DEPTH = 64

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor described and not built: a view of a storage."""

    storage: StorageRef
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def __repr__(self) -> str:
        return f"<tensor {'x'.join(map(str, self.shape)) or 'scalar'} {str(self.dtype).removeprefix('torch.')}>"


class Record:
    """An object of a class on the allow-list, as its arguments and state only. Nothing of the class is run."""

    __slots__ = ("args", "state")
    name = "record"
    opaque = False

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: dict[str, Any] = {}

    def __new__(cls, *args: Any) -> Record:
        self = super().__new__(cls)
        self.args, self.state = args, {}
        return self

    def __setstate__(self, state: Any) -> None:
        # Slotted dataclasses and enums pickle (dict, slots); everything else that torch writes pickles one dict.
        if isinstance(state, tuple) and len(state) == 2 and all(part is None or isinstance(part, dict) for part in state):
            state = {**(state[0] or {}), **(state[1] or {})}
        self.state = state if isinstance(state, dict) else {"state": state}

    def append(self, item: Any) -> None:
        """Take a list subclass's items without keeping them apart."""
        self.state.setdefault("items", []).append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.state.setdefault("entries", {})[key] = value

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Stateful(list[dict[str, Any]]):
    """A record of a class that occurs by the million: a list whose one item is the state.

    Both its making and its ``__setstate__`` are C functions, so the unpickler never enters Python for it.
    """

    __slots__ = ()
    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class _Inert:
    """A function that a pickle may call. It has no attributes that a pickle could set."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("the file sets the state of a function")


def _tensor(storage: StorageRef, offset: int, size: Any, stride: Any, *rest: Any) -> TensorRef:
    if not isinstance(storage, StorageRef):
        raise pickle.UnpicklingError("a tensor without a storage")
    # _rebuild_tensor_v3 has the dtype after requires_grad and the hooks, and an untyped storage.
    dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage.dtype
    if dtype is None:
        raise pickle.UnpicklingError("a tensor without a dtype")
    shape, strides = tuple(int(n) for n in size), tuple(int(n) for n in stride)
    if len(shape) != len(strides) or any(n < 0 for n in (*shape, *strides, offset)):
        raise pickle.UnpicklingError(f"a tensor of shape {shape} with strides {strides}")
    return TensorRef(storage, dtype, shape, strides, int(offset))


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    # torch._tensor._rebuild_from_type_v2: a tensor subclass. The only callables within reach are this module's.
    if not isinstance(function, _Inert):
        raise pickle.UnpicklingError("a tensor subclass is rebuilt by something that is no function of torch")
    built = function(*args)
    if isinstance(built, Record):
        built.__setstate__(state)
    return built


def _wrapper(kind: Any, dtype: Any, size: Any, *_: Any) -> Record:
    if not (isinstance(kind, type) and issubclass(kind, Record)):
        raise pickle.UnpicklingError("a tensor subclass that is no class")
    return kind(dtype, tuple(size))


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin-1")


def _copied(kind: type) -> _Inert:
    # From a sequence only: bytearray(10**12) or set(10**9 items by repetition) would be a bomb.
    def build(items: Any = ()) -> Any:
        if not isinstance(items, list | tuple | bytes | bytearray | set | frozenset):
            raise pickle.UnpicklingError(f"a {kind.__name__} of {type(items).__name__}")
        return kind(items)

    return _Inert(build)


def _counter(counts: Any = ()) -> Counter[Any]:
    if counts != () and not isinstance(counts, dict):
        raise pickle.UnpicklingError(f"a Counter of {type(counts).__name__}")
    return Counter(counts)


def _array(kind: Any, shape: Any, typecode: Any) -> _NumpyArray:
    return _NumpyArray()


class _NumpyArray(Record):
    """numpy's ``_reconstruct`` and the state that follows it; :func:`plain` turns it into an array."""

    __slots__ = ()
    name = "numpy.ndarray"


class _NumpyScalar(Record):
    __slots__ = ()
    name = "numpy scalar"


_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): _Inert(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _Inert(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): _Inert(_tensor),
    ("torch._utils", "_rebuild_parameter"): _Inert(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): _Inert(_parameter),
    ("torch._utils", "_rebuild_wrapper_subclass"): _Inert(_wrapper),
    ("torch._tensor", "_rebuild_from_type_v2"): _Inert(_from_type),
    ("torch.serialization", "_get_layout"): _Inert(str),
    ("torch", "device"): _Inert(torch.device),
    # The type itself, which nothing can change: sizes and the next three classes are most of a large .metadata file.
    ("torch", "Size"): torch.Size,
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"): Stateful,
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): Stateful,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Stateful,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): _Inert(_counter),
    ("_codecs", "encode"): _Inert(_encode),
    ("builtins", "set"): _copied(set),
    ("builtins", "frozenset"): _copied(frozenset),
    ("builtins", "bytearray"): _copied(bytearray),
    ("builtins", "bytes"): _copied(bytes),
    ("builtins", "complex"): _Inert(lambda real, imag=0.0: complex(float(real), float(imag))),
    ("numpy.core.multiarray", "_reconstruct"): _Inert(_array),
    ("numpy._core.multiarray", "_reconstruct"): _Inert(_array),
    ("numpy.core.multiarray", "scalar"): _NumpyScalar,
    ("numpy._core.multiarray", "scalar"): _NumpyScalar,
}


class AllowList:
    """Turns names into records; the base of the restricted unpicklers.

    The stream decides which records are made, never which code is run.
    """

    def __init__(self, data: bytes, storages: bool = False) -> None:
        super().__init__(io.BytesIO(data))  # type: ignore[call-arg]
        self._storages = storages
        self._classes: dict[tuple[str, str], type[Record]] = {}
        self.unknown: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        # Protocols up to 2, torch.save's among them, write the Python 2 name of this module.
        module = "builtins" if module == "__builtin__" else module
        if (module, name) == ("builtins", "getattr"):
            return _Inert(self._member)
        found = _FUNCTIONS.get((module, name))
        if found is not None:
            return found
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module in ("torch", "torch.cuda", "torch.storage") and name in STORAGES:
            return _Inert(lambda *_, _dtype=STORAGES[name]: _dtype)
        return self._record(module, name)

    def _record(self, module: str, name: str) -> type[Record]:
        made = self._classes.get((module, name))
        if made is None:
            known = (module, name) in RECORD_NAMES or (module + ".").startswith(RECORD_MODULES)
            if not known:
                self.unknown.add(f"{module}.{name}")
            made = type("Record", (Record,), {"__slots__": (), "name": f"{module}.{name}", "opaque": not known})
            self._classes[module, name] = made
        return made

    def _member(self, kind: Any, name: Any) -> type[Record]:
        # Protocol 2 pickles a nested class, and Python 3.11 an enum's member, as getattr(class, name). Only torch's data classes
        # have such; of any other class it is a method, which torch would call.
        if not (isinstance(kind, type) and issubclass(kind, Record)) or not isinstance(name, str):
            raise pickle.UnpicklingError("an attribute of something that is no record")
        whole = f"{kind.name}.{name}"
        known = whole.startswith(RECORD_MODULES)
        if not known and not kind.opaque:
            self.unknown.add(whole)
        return type("Record", (kind,), {"__slots__": (), "name": whole, "opaque": not known})

    def persistent_load(self, pid: Any) -> StorageRef:
        if not (self._storages and isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"):
            raise pickle.UnpicklingError("a persistent id that is no storage")
        _, kind, key, _location, numel = pid[:5]
        if not isinstance(kind, _Inert) or not isinstance(key, str) or not isinstance(numel, int):
            raise pickle.UnpicklingError("a storage that cannot be read")
        return StorageRef(key, kind(), numel)


class _Reader(AllowList, pickle.Unpickler):
    """The restricted unpickler."""


def load(data: bytes, path: object, *, unknown: Unknown = "refuse", storages: bool = False) -> tuple[Any, tuple[str, ...]]:
    """Read a pickle from a checkpoint.

    Args:
        data: The pickle's bytes.
        path: The file, for messages.
        unknown: What to do about names outside the allow-list: refuse the file, or keep them as opaque records.
        storages: Whether tensors with storages elsewhere in the file may occur (torch.save archives).

    Returns:
        The object, of plain Python data, :class:`TensorRef` and :class:`Record`; and the unknown names, sorted.

    Raises:
        UnsafeCheckpointError: It names something outside the allow-list and ``unknown`` is ``refuse``.
        CheckpointFormatError: It is no pickle, is cut off or damaged.

    Ranks: local.
    """
    reader = _Reader(data, storages)
    try:
        if len(data) <= _PRESCAN_BYTES:
            _check_memo(data)
        value = reader.load()
    except UnsafeCheckpointError:
        raise
    except Exception as error:
        if reader.unknown and unknown == "refuse":
            raise UnsafeCheckpointError(path, list(reader.unknown)) from None
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointFormatError(
            path, f"its pickle cannot be read ({reason}). The file is cut off, damaged or no checkpoint."
        ) from None
    if reader.unknown and unknown == "refuse":
        raise UnsafeCheckpointError(path, list(reader.unknown))
    return value, tuple(sorted(reader.unknown))


def _check_memo(data: bytes) -> None:
    # A single LONG_BINPUT with a large index makes the C unpickler fill gigabytes with a memo of null pointers.
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("LONG_BINPUT", "PUT") and argument is not None and argument > len(data):
            raise pickle.UnpicklingError("a memo index larger than the file")


def plain(value: Any, path: object, *, tensor: Callable[[TensorRef], Any] | None = None) -> Any:
    """Turn what :func:`load` gave into ordinary Python data. What occurs several times in it is one object, as it was.

    Args:
        value: A value made of plain data, records and references.
        path: The file, for messages.
        tensor: Reads a tensor that is referred to; None where no tensor may occur.

    Raises:
        CheckpointFormatError: It holds something that is no plain data (a tensor, an opaque record, deep nesting).
    """
    # A few bytes of pickle can say "twice the list before" sixty times over.
    known: dict[int, Any] = {}

    def turn(item: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise CheckpointFormatError(path, f"a value is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(item, dict | list | tuple | set | frozenset) and not isinstance(item, Stateful):
            if id(item) not in known:
                known[id(item)] = gather(item, depth + 1)
            return known[id(item)]
        if isinstance(item, _NumpyArray | _NumpyScalar):
            return _to_numpy(item, path)
        if isinstance(item, TensorRef) and tensor is not None:
            return tensor(item)
        if isinstance(item, Record | Stateful | TensorRef | StorageRef | _Inert | type):
            raise CheckpointFormatError(path, f"it holds {item!r}, which labkit does not turn back into an object")
        return item

    def gather(items: Any, depth: int) -> Any:
        if isinstance(items, dict):
            pairs = {key: turn(item, depth) for key, item in items.items()}
            return type(items)(pairs) if isinstance(items, OrderedDict | Counter) else pairs
        return type(items)(turn(item, depth) for item in items)

    return turn(value, 0)


def _to_numpy(value: Record, path: object) -> Any:
    try:
        if isinstance(value, _NumpyScalar):
            dtype, data = value.args
            return np.frombuffer(_as_bytes(data), dtype=_numpy_dtype(dtype, path))[0]
        _, shape, dtype, fortran, data = value.state["state"]
        array = np.frombuffer(_as_bytes(data), dtype=_numpy_dtype(dtype, path))
        return array.reshape(shape, order="F" if fortran else "C").copy()
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointFormatError(path, f"a numpy array that cannot be read ({error})") from None


def _as_bytes(data: Any) -> bytes:
    return data if isinstance(data, bytes) else _encode(data)


def _numpy_dtype(record: Any, path: object) -> np.dtype[Any]:
    if not isinstance(record, Record) or not record.args or not isinstance(record.args[0], str):
        raise CheckpointFormatError(path, "a numpy dtype that cannot be read")
    code = record.args[0]
    state = record.state.get("state")
    order = state[1] if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">") else ""
    if code[:1] not in "biufc":
        raise CheckpointFormatError(path, f"a numpy array of dtype {code!r}, which is no number")
    return np.dtype(order + code)


def walk(value: Any, path: object) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The leaves of nested dicts and lists, each with the keys that lead to it, in stored order.

    A list or tuple is a leaf unless a tensor or a dict lies in it, as in DCP's own flattening, and so is an empty dict.

    Raises:
        CheckpointFormatError: A nesting that refers to itself or is deeper than 64 levels.
    """
    stack: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while stack:
        prefix, item = stack.pop()
        if len(prefix) > _MAX_DEPTH:
            raise CheckpointFormatError(path, f"a state nested deeper than {_MAX_DEPTH} levels, or one that contains itself")
        if isinstance(item, dict) and not isinstance(item, Counter) and (item or not prefix):
            stack.extend(((*prefix, key if isinstance(key, int) else str(key)), sub) for key, sub in reversed(item.items()))
        elif isinstance(item, list | tuple) and _holds_tensors(item, _MAX_DEPTH, set()):
            stack.extend(((*prefix, index), sub) for index, sub in reversed(list(enumerate(item))))
        else:
            yield prefix, item


def _holds_tensors(items: Any, depth: int, without: set[int]) -> bool:
    """Whether a tensor or a dict lies in a list; ``without`` collects the lists that hold none, which may occur many times."""
    if depth == 0:
        return True
    for item in items:
        if isinstance(item, dict | TensorRef) or (
            isinstance(item, Record) and isinstance(item.state.get("_local_tensor"), TensorRef)
        ):
            return True
        if isinstance(item, list | tuple) and id(item) not in without and _holds_tensors(item, depth - 1, without):
            return True
    without.add(id(items))
    return False

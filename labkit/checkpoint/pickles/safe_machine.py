"""A pickle machine that knows which names are data, and turns them into records."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pickle import UnpicklingError
from typing import Any

import torch

from labkit.checkpoint.pickles.allow_list import RECORD_NAMES
from labkit.checkpoint.pickles.pickle_machine import PickleMachine, Stateful
from labkit.checkpoint.pickles.pickle_rebuilders import REBUILDERS, storage, storage_kind
from labkit.checkpoint.pickles.pickle_records import DTYPES, Class, Function, Record, StorageRef

_MOST_UNKNOWN = 100
_DCP = "torch.distributed.checkpoint"
_NUMPY_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")

# Plain types, which a pickle cannot modify; sizes and these three classes make up most of a large .metadata file.
_TYPES: dict[tuple[str, str], type] = {
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): Stateful,
    (f"{_DCP}.metadata", "MetadataIndex"): Stateful,
    (f"{_DCP}.filesystem", "_StorageInfo"): Stateful,
    ("collections", "OrderedDict"): OrderedDict,
}


# Factories of a defaultdict: classes that a pickle may name but not call.
_FACTORIES = ("list", "dict", "int", "float", "str", "tuple", "bool", "long", "unicode")  # the last two: int and str in protocol 2


class NumpyArray(Record):
    """The result of numpy's ``_reconstruct`` and its state; :func:`plain` turns it into an array."""

    __slots__ = ()


class NumpyScalar(Record):
    """The value that numpy's ``scalar`` returns."""

    __slots__ = ()


class SafeMachine(PickleMachine):
    """A machine that turns names into records. The pickle decides which records are made, but never which code runs.

    Args:
        data: The pickle.
        storages: Whether it belongs to a torch.save archive, where tensors' storages may be elsewhere. DCP's index has no tensors,
            and each torch.Size in it is kept as a plain tuple.

    Attributes:
        unknown: The first hundred names in it that are outside the allow-list.
    """

    def __init__(self, data: bytes, storages: bool = False) -> None:
        super().__init__(data)
        self._storages = storages
        self._classes: dict[tuple[str, str], Class] = {}
        self._factories: dict[str, Class] = {}
        self.unknown: set[str] = set()
        self._own: dict[tuple[str, str], Function] = {
            ("builtins", "getattr"): Function(self._member),
            ("builtins", "set"): Function(lambda items=(): self._set(items)),
            ("builtins", "frozenset"): Function(lambda items=(): frozenset(self._set(items))),
            ("builtins", "bytearray"): Function(lambda items=b"": bytearray(_bytes(items))),
            ("builtins", "bytes"): Function(lambda items=b"": _bytes(items)),
            ("collections", "Counter"): Function(_counter),
            ("builtins", "complex"): Function(lambda real, imag=0.0: complex(float(real), float(imag))),
            ("_codecs", "encode"): Function(encode),
            ("torch", "device"): Function(_device),
            ("torch", "Size"): Function(_size),
        }

    def find_class(self, module: str, name: str) -> Any:
        # Protocols up to 2, which torch.save also uses, write the Python 2 name of this module.
        pair = ("builtins" if module == "__builtin__" else module, name)
        if pair == ("torch", "Size") and not self._storages:
            return tuple
        found = _TYPES.get(pair) or REBUILDERS.get(pair) or self._own.get(pair)
        if found is not None:
            return found
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if module in _NUMPY_CORES and name in ("_reconstruct", "scalar"):
            made = NumpyArray if name == "_reconstruct" else NumpyScalar
            kind = Class(module, name, opaque=False)
            return Function(lambda *arguments: made(kind, arguments))
        if pair[0] == "builtins" and name in _FACTORIES:
            return self._factories.setdefault(name, Class(*pair, opaque=False))
        return storage_kind(module, name) or self._class(*pair)

    def _defaultdict(self, kind: Class, arguments: tuple[Any, ...]) -> Any:
        # A plain dict is equivalent: the factory would only be called for missing keys.
        factory = arguments[0] if arguments else None
        known = factory is None or factory is OrderedDict or isinstance(factory, Function) or factory in self._factories.values()
        return {} if known and len(arguments) < 2 else Record(kind, arguments)

    def _class(self, module: str, name: str) -> Class:
        made = self._classes.get((module, name))
        if made is None:
            made = self._classes[module, name] = Class(module, name, opaque=(module, name) not in RECORD_NAMES)
            if made.opaque and len(self.unknown) < _MOST_UNKNOWN:
                self.unknown.add(made.name)
        return made

    def _member(self, kind: Any, name: Any) -> Class:
        # Protocol 2 pickles a nested class, and Python 3.11 pickles an enum's member, as getattr(class, name). On any other class
        # this would be a method, which torch would call.
        if not isinstance(kind, Class) or not isinstance(name, str) or len(name) > 100:
            raise UnpicklingError("an attribute of something that is not a class")
        return kind if kind.opaque else self._class(kind.module, f"{kind.qualname}.{name}")

    def _set(self, items: Any) -> set[Any]:
        # Accept only a sequence: set(range(10**9)) would be a bomb.
        if type(items) not in (list, tuple, set, frozenset):
            raise UnpicklingError(f"a set of {type(items).__name__}")
        self.budget.charge_parts(len(items))
        found: set[Any] = set()
        self.add_items(found, list(items))
        return found

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if type(function) is Class:
            if function.name == "collections.defaultdict":
                return self._defaultdict(function, arguments)
            if function is self._factories.get(function.qualname):
                function = self._class(function.module, function.qualname)
            return Record(function, arguments)
        if type(function) is Function:
            return function.call(*arguments)
        if function is OrderedDict and len(arguments) < 2:
            made: OrderedDict[Any, Any] = OrderedDict()
            self.budget.charge_parts(len(arguments[0]) if arguments else 0)
            for pair in arguments[0] if arguments else ():
                if type(pair) not in (tuple, list) or len(pair) != 2:
                    raise UnpicklingError("an OrderedDict of something that is not a sequence of pairs")
                self.set_items(made, list(pair))
            return made
        if function is tuple:
            return tuple(_size(*arguments))
        raise UnpicklingError("a call of something that is not a function")

    def put_items(self, target: Any, items: list[Any]) -> None:
        if not isinstance(target, Record):
            raise UnpicklingError("items of something that takes none")
        target.items += items

    def build(self, target: Any, state: Any) -> None:
        if isinstance(target, Record):
            self.budget.charge(sum(len(part) for part in state if isinstance(part, dict)) if isinstance(state, tuple) else 0)
            target.set_state(state)
        elif type(target) is OrderedDict:
            # A module's state dict has the attribute _metadata, which is no entry, so it is dropped.
            if type(state) is not dict or any(not isinstance(key, str) or hasattr(OrderedDict, key) for key in state):
                raise UnpicklingError("it replaces a method of an OrderedDict")
        else:
            raise UnpicklingError("it sets the state of something that has none")

    def persistent_load(self, reference: Any) -> StorageRef:
        if not (self._storages and isinstance(reference, tuple) and len(reference) >= 5 and reference[0] == "storage"):
            raise UnpicklingError("a persistent id that is not a storage")
        _, kind, key, _location, numel = reference[:5]
        return storage(kind, key, numel)


def _bytes(items: Any) -> bytes:
    if not isinstance(items, bytes | bytearray | list | tuple):  # bytes(10**12) would be a bomb
        raise UnpicklingError(f"bytes of {type(items).__name__}")
    return bytes(items)


def _counter(counts: Any = None) -> Counter[Any]:
    # The keys of a dict have already been checked.
    if counts is not None and type(counts) is not dict:
        raise UnpicklingError(f"a Counter of {type(counts).__name__}")
    return Counter(counts)


def _size(sizes: Any = ()) -> torch.Size:
    if not isinstance(sizes, list | tuple):
        raise UnpicklingError(f"a size of {type(sizes).__name__}")
    return torch.Size(sizes)


def _device(*arguments: Any) -> torch.device:
    if not all((isinstance(item, str) and len(item) < 40) or (type(item) is int and item < 1 << 16) for item in arguments):
        raise UnpicklingError("a device that cannot be read")
    return torch.device(*arguments)


def encode(text: str, encoding: str = "latin1") -> bytes:
    """Return the bytes behind a string, as protocol 2 pickles them."""
    if encoding not in ("latin1", "latin-1"):
        raise UnpicklingError("bytes in an encoding other than latin1")
    return text.encode("latin-1")

"""Read the pickles in checkpoints without running anything that they name.

A pickle is a small program: it may name any importable function and call it. Here no name is ever imported. Each name on
the allow-list stands for an inert record that only remembers its arguments; any other name refuses the file (or is kept as an
opaque record when the caller wants to look on). See the warning in :mod:`pickle`, and :func:`torch.load` with
``weights_only=True`` for torch's own restricted reader, which builds real tensors and knows neither ``.metadata`` nor FSDP1's
sharded tensors.

What reading may cost is in proportion to the pickle: :mod:`labkit.checkpoint.pickle_machine` sees to it for the reading itself,
:mod:`labkit.checkpoint.pickle_values` for what is made of it.
"""

from __future__ import annotations

import gc
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any, Literal

import torch

from labkit.checkpoint.allow_list import RECORD_NAMES
from labkit.checkpoint.errors import CheckpointFormatError, UnsafeCheckpointError
from labkit.checkpoint.pickle_machine import PickleMachine
from labkit.checkpoint.pickle_records import Class, Function, Record, Stateful
from labkit.checkpoint.pickle_tensors import DTYPES, REBUILDERS, StorageRef, storage, storage_kind
from labkit.checkpoint.pickle_values import NumpyArray, NumpyScalar, encode

Unknown = Literal["refuse", "opaque"]
_MOST_UNKNOWN = 100
_PAUSE_BYTES = 1 << 20
_DCP = "torch.distributed.checkpoint"
# What a damaged or hostile pickle makes the machine raise.
_DAMAGED = (UnpicklingError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error)
_NUMPY_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")

# The types themselves, which nothing can change: sizes and the three classes are most of a large .metadata file.
_TYPES: dict[tuple[str, str], type] = {
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): Stateful,
    (f"{_DCP}.metadata", "MetadataIndex"): Stateful,
    (f"{_DCP}.filesystem", "_StorageInfo"): Stateful,
    ("collections", "OrderedDict"): OrderedDict,
}


class SafeMachine(PickleMachine):
    """The machine that turns names into records. The stream decides which records are made, never which code is run.

    Args:
        data: The pickle.
        storages: Whether it is of a torch.save archive, in which tensors with storages elsewhere may occur. In DCP's index
            there are none, and a torch.Size is a plain tuple.

    Attributes:
        unknown: The names outside the allow-list that it asks for, the first hundred of them.
    """

    def __init__(self, data: bytes, storages: bool = False) -> None:
        super().__init__(data)
        self._storages = storages
        self._classes: dict[tuple[str, str], Class] = {}
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
        # Protocols up to 2, torch.save's among them, write the Python 2 name of this module.
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
        return storage_kind(module, name) or self._class(*pair)

    def _class(self, module: str, name: str) -> Class:
        made = self._classes.get((module, name))
        if made is None:
            made = self._classes[module, name] = Class(module, name, opaque=(module, name) not in RECORD_NAMES)
            if made.opaque and len(self.unknown) < _MOST_UNKNOWN:
                self.unknown.add(made.name)
        return made

    def _member(self, kind: Any, name: Any) -> Class:
        # Protocol 2 pickles a nested class, and Python 3.11 an enum's member, as getattr(class, name). Of any other class it is a
        # method, which torch would call.
        if not isinstance(kind, Class) or not isinstance(name, str) or len(name) > 100:
            raise UnpicklingError("an attribute of something that is no class")
        return kind if kind.opaque else self._class(kind.module, f"{kind.qualname}.{name}")

    def _set(self, items: Any) -> set[Any]:
        # From a sequence only: set(range(10**9)) would be a bomb.
        if type(items) not in (list, tuple, set, frozenset):
            raise UnpicklingError(f"a set of {type(items).__name__}")
        self.budget.charge_parts(len(items))
        found: set[Any] = set()
        self.add_items(found, list(items))
        return found

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if type(function) is Class:
            return Record(function, arguments)
        if type(function) is Function:
            return function.call(*arguments)
        if function is OrderedDict and len(arguments) < 2:
            made: OrderedDict[Any, Any] = OrderedDict()
            self.budget.charge_parts(len(arguments[0]) if arguments else 0)
            for pair in arguments[0] if arguments else ():
                if type(pair) not in (tuple, list) or len(pair) != 2:
                    raise UnpicklingError("an OrderedDict of something that is no row of pairs")
                self.set_items(made, list(pair))
            return made
        if function is tuple:
            return tuple(_size(*arguments))
        raise UnpicklingError("a call of something that is no function")

    def put_items(self, target: Any, items: list[Any]) -> None:
        if not isinstance(target, Record):
            raise UnpicklingError("items of something that takes none")
        target.items += items

    def build(self, target: Any, state: Any) -> None:
        if isinstance(target, Record):
            self.budget.charge(sum(len(part) for part in state if isinstance(part, dict)) if isinstance(state, tuple) else 0)
            target.set_state(state)
        elif type(target) is OrderedDict:
            # A module's state dict has _metadata so. It is left out, and so is no part of what is listed.
            if type(state) is not dict or any(not isinstance(key, str) or hasattr(OrderedDict, key) for key in state):
                raise UnpicklingError("it replaces a method of an OrderedDict")
        else:
            raise UnpicklingError("it sets the state of something that has none")

    def persistent_load(self, reference: Any) -> StorageRef:
        if not (self._storages and isinstance(reference, tuple) and len(reference) >= 5 and reference[0] == "storage"):
            raise UnpicklingError("a persistent id that is no storage")
        _, kind, key, _location, numel = reference[:5]
        return storage(kind, key, numel)


def _bytes(items: Any) -> bytes:
    if not isinstance(items, bytes | bytearray | list | tuple):  # bytes(10**12) would be a bomb
        raise UnpicklingError(f"bytes of {type(items).__name__}")
    return bytes(items)


def _counter(counts: Any = None) -> Counter[Any]:
    # What is in a dict already has keys that were looked at.
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


def load(data: bytes, path: object, *, unknown: Unknown = "refuse", storages: bool = False) -> tuple[Any, tuple[str, ...]]:
    """Read a pickle from a checkpoint.

    Args:
        data: The pickle's bytes.
        path: The file, for messages.
        unknown: What to do about names outside the allow-list: refuse the file, or keep them as opaque records.
        storages: Whether tensors with storages elsewhere in the file may occur (torch.save archives).

    Returns:
        The object, of plain Python data, :class:`TensorRef`, :class:`UnsupportedTensor` and :class:`Record`; and the unknown names,
        sorted.

    Raises:
        UnsafeCheckpointError: It names something outside the allow-list and ``unknown`` is ``refuse``, or it cannot be read beside.
        CheckpointFormatError: It is no pickle, is cut off or damaged, or asks for work out of proportion to its length.

    Ranks: local.
    """
    machine = SafeMachine(data, storages)
    try:
        with _collector_paused(len(data) > _PAUSE_BYTES):
            value = machine.load()
    except _DAMAGED as error:
        if machine.unknown:
            raise UnsafeCheckpointError(path, list(machine.unknown)) from None
        reason = (
            "it ends in the middle, or takes what is not there"
            if isinstance(error, IndexError)
            else f"{type(error).__name__}: {str(error)[:300]}"
        )
        raise CheckpointFormatError(
            path, f"its pickle cannot be read ({reason}). The file is cut off, damaged or no checkpoint."
        ) from None
    if machine.unknown and unknown == "refuse":
        raise UnsafeCheckpointError(path, list(machine.unknown))
    return value, tuple(sorted(machine.unknown))


@contextmanager
def _collector_paused(pause: bool) -> Iterator[None]:
    # Millions of objects that all stay make the collector look through them again and again: half of the time.
    pause = pause and gc.isenabled()
    if pause:
        gc.disable()
    try:
        yield
    finally:
        if pause:
            gc.enable()

"""Reading of the pickles in checkpoints without running anything that they name.

A pickle is a small program: it may name any importable function and call it. Here no name is ever imported. A name on the
allow-list becomes an inert record that only stores its arguments. For any other name, the file is refused or, if the caller still
wants to inspect it, the name becomes an opaque record. See the warning in :mod:`pickle`. torch's own restricted reader,
:func:`torch.load` with ``weights_only=True``, builds real tensors, but reads neither ``.metadata`` nor FSDP1's sharded tensors.

The cost is proportional to the pickle's length: :mod:`labkit.checkpoint.pickles.pickle_machine` limits the reading itself, and this
module the conversion of the result.
"""

from __future__ import annotations

import gc
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any, Literal

import numpy as np
import torch

from labkit.checkpoint.errors import CheckpointFormatError, UnsafeCheckpointError, UnsupportedTensorError
from labkit.checkpoint.pickles.pickle_budget import FREE_UNITS, UNITS_PER_BYTE
from labkit.checkpoint.pickles.pickle_records import Class, IntKey, Record, TensorRef, UnsupportedTensor, is_tensor
from labkit.checkpoint.pickles.safe_machine import NumpyArray, NumpyScalar, SafeMachine, encode

Unknown = Literal["refuse", "opaque"]
_PAUSE_BYTES = 1 << 20
_MAX_DEPTH = 64
_NAMES_PER_BYTE = 8
# Errors that a damaged or hostile pickle can cause in the machine.
_DAMAGED = (UnpicklingError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error)


def load(data: bytes, path: object, *, unknown: Unknown = "refuse", storages: bool = False) -> tuple[Any, tuple[str, ...]]:
    """Read a pickle from a checkpoint.

    Args:
        data: The pickle's bytes.
        path: The file, for messages.
        unknown: How to treat names outside the allow-list: refuse the file, or keep them as opaque records.
        storages: Whether tensors may have their storages elsewhere in the file (torch.save archives).

    Returns:
        The object, made of plain Python data, :class:`TensorRef`, :class:`UnsupportedTensor` and :class:`Record`; and the unknown
        names, sorted.

    Raises:
        UnsafeCheckpointError: It names something outside the allow-list, and ``unknown`` is ``refuse`` or it cannot be read.
        CheckpointFormatError: It is not a pickle, is cut off or damaged, or needs work out of proportion to its length.

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
            "it ends in the middle, or takes objects that are not there"
            if isinstance(error, IndexError)
            else f"{type(error).__name__}: {str(error)[:300]}"
        )
        raise CheckpointFormatError(
            path, f"its pickle cannot be read ({reason}). The file is cut off, damaged or not a checkpoint."
        ) from None
    if machine.unknown and unknown == "refuse":
        raise UnsafeCheckpointError(path, list(machine.unknown))
    return value, tuple(sorted(machine.unknown))


@contextmanager
def _collector_paused(pause: bool) -> Iterator[None]:
    # With millions of objects that all stay alive, the garbage collector's repeated scans take half of the time.
    pause = pause and gc.isenabled()
    if pause:
        gc.disable()
    try:
        yield
    finally:
        if pause:
            gc.enable()


def plain(value: Any, path: object, *, tensor: Callable[[TensorRef], Any] | None = None) -> Any:
    """Turn the result of :func:`load` into ordinary Python data.

    Shared objects stay shared.

    Args:
        value: A value made of plain data, records and references.
        path: The file, for messages.
        tensor: Reads a referenced tensor; None if no tensor may occur.

    Raises:
        UnsupportedTensorError: It holds a tensor that labkit does not read.
        CheckpointFormatError: It holds something that is not plain data (a tensor, an opaque record, deep nesting).
    """
    return _Plain(path, tensor).turn(value, 0)


class _Plain:
    """The converter of :func:`plain`. It converts shared values only once: a few bytes can double a list sixty times."""

    def __init__(self, path: object, tensor: Callable[[TensorRef], Any] | None) -> None:
        self._path, self._tensor = path, tensor
        self._known: dict[int, Any] = {}
        self._array_bytes: dict[int, int] = {}
        self._copied = 0

    def turn(self, item: Any, depth: int) -> Any:
        kind = type(item)
        if kind in (str, int, float, bool, type(None), bytes, bytearray, complex, torch.dtype, torch.device, torch.Size):
            return item
        if depth > _MAX_DEPTH:
            raise CheckpointFormatError(self._path, f"a value is nested deeper than {_MAX_DEPTH} levels")
        if id(item) not in self._known:
            self._known[id(item)] = self._make(item, depth + 1)
        return self._known[id(item)]

    def _make(self, item: Any, depth: int) -> Any:
        if type(item) in (dict, OrderedDict, Counter):
            pairs = {self._key(key, depth): self.turn(part, depth) for key, part in item.items()}
            return pairs if type(item) is dict else type(item)(pairs)
        if type(item) in (list, tuple, set, frozenset):
            return type(item)(self.turn(part, depth) for part in item)
        if isinstance(item, TensorRef) and self._tensor is not None:
            return self._tensor(item)
        if isinstance(item, NumpyArray | NumpyScalar):
            return self._to_numpy(item)
        if isinstance(item, UnsupportedTensor):
            raise UnsupportedTensorError(self._path, item.what)
        raise CheckpointFormatError(self._path, f"it holds {_short(item)}, which labkit does not turn back into an object")

    def _key(self, key: Any, depth: int) -> Any:
        turned = self.turn(key, depth)
        if isinstance(turned, torch.Tensor):
            raise CheckpointFormatError(self._path, "it has a tensor for a key")
        return turned

    def _to_numpy(self, value: Record) -> Any:
        try:
            if isinstance(value, NumpyScalar):
                dtype, data = value.args
                return np.frombuffer(_as_bytes(data), dtype=self._dtype(dtype))[0]
            _, shape, dtype, fortran, data = value.state["state"]
            self._count(data)
            array = np.frombuffer(_as_bytes(data), dtype=self._dtype(dtype))
            return array.reshape(shape, order="F" if fortran else "C").copy()
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointFormatError(self._path, f"a numpy array that cannot be read ({str(error)[:200]})") from None

    def _count(self, data: Any) -> None:
        # Each array gets its own memory, even if several refer to the same bytes.
        self._array_bytes[id(data)] = len(data)
        self._copied += len(data)
        if self._copied > UNITS_PER_BYTE * sum(self._array_bytes.values()) + FREE_UNITS:
            raise CheckpointFormatError(self._path, "its numpy arrays repeat the same bytes far more often than its length allows")

    def _dtype(self, record: Any) -> np.dtype[Any]:
        if not isinstance(record, Record) or not record.args or not isinstance(record.args[0], str):
            raise CheckpointFormatError(self._path, "a numpy dtype that cannot be read")
        code = record.args[0]
        state = record.state.get("state")
        order = state[1] if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">") else ""
        if code[:1] not in "biufc":
            raise CheckpointFormatError(self._path, f"a numpy array of dtype {code[:20]!r}, which is not a number")
        return np.dtype(order + code)


def _as_bytes(data: Any) -> bytes:
    return data if isinstance(data, bytes) else encode(data)


def _short(item: Any) -> str:
    if isinstance(item, Record | TensorRef | UnsupportedTensor | Class):
        return repr(item)
    return f"a {type(item).__name__}"


class Walk:
    """A walk over the leaves of a nested state in stored order, each with the keys that lead to it.

    A list or tuple is a leaf unless it contains a tensor or a dict, as in DCP's own flattening. An empty dict is a leaf too.

    Args:
        path: The file, for messages.
        size: The length of the pickle in bytes. All names together may have eight times as many characters, plus a million. Since a
            shared value is listed under each of its names, this refuses a dict that is doubled fifty times.
    """

    def __init__(self, path: object, size: int) -> None:
        self._path, self._left = path, _NAMES_PER_BYTE * size + FREE_UNITS
        self._without: set[int] = set()

    def leaves(self, value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
        """Yield the keys and value of each leaf.

        Raises:
            CheckpointFormatError: The state contains itself, is nested deeper than 64 levels, or has far more leaves than the
                pickle has bytes.
        """
        stack: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
        while stack:
            prefix, item = stack.pop()
            if len(prefix) > _MAX_DEPTH:
                raise CheckpointFormatError(
                    self._path, f"a state nested deeper than {_MAX_DEPTH} levels, or one that contains itself"
                )
            if type(item) in (dict, OrderedDict) and (item or not prefix):
                self._charge(prefix, len(item))
                stack.extend(((*prefix, self._key(key)), sub) for key, sub in reversed(item.items()))
            elif type(item) in (list, tuple) and self._holds_tensors(item, _MAX_DEPTH):
                self._charge(prefix, len(item))
                stack.extend(((*prefix, index), sub) for index, sub in reversed(list(enumerate(item))))
            else:
                yield prefix, item

    def _key(self, key: Any) -> str | int:
        found = IntKey(key) if type(key) is int else str(key)
        self._charge((found,), 1)
        return found

    def _charge(self, prefix: tuple[str | int, ...], count: int) -> None:
        self._left -= count * (1 + sum(len(part) + 1 if isinstance(part, str) else 20 for part in prefix))
        if self._left < 0:
            raise CheckpointFormatError(
                self._path, "it lists far more entries than its length allows, by repeating its parts. No training state does so."
            )

    def _holds_tensors(self, items: Any, depth: int) -> bool:
        """Return whether a list contains a tensor or a dict. A shared list without any is searched only once."""
        if depth == 0:
            return True
        if id(items) in self._without:
            return False
        self._charge((), len(items))
        for item in items:
            if isinstance(item, dict) or is_tensor(item):
                return True
            if type(item) in (list, tuple) and self._holds_tensors(item, depth - 1):
                return True
        self._without.add(id(items))
        return False

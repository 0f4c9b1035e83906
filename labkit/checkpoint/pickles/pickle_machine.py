"""Execution of a pickle's opcodes at a cost proportional to its length.

Python's own unpickler lets the file decide the cost: a few bytes may ask for a memo of gigabytes, or for the hash of a tuple that
holds itself 2**50 times. Here every opcode does a bounded amount of work, and repeatable work is charged to a budget. Only opcodes
that Python 3 writes in protocols 2 to 5 are supported; :mod:`pickletools` describes them. A subclass decides what names and calls
mean.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

from labkit.checkpoint.pickles.pickle_budget import PickleBudget

_LONGEST_NAME = 200
_SIZED = frozenset({str, bytes, bytearray, list, tuple, dict, set, frozenset})


class Stateful(list[dict[str, Any]]):
    """A cheap record for a class with millions of objects: a list whose only item is the state."""

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class PickleMachine:
    """The machine that executes a pickle as its program.

    Args:
        data: The pickle.

    Attributes:
        memo: Memoized objects, in order. A list, or an object of a subclass that can also number runs of objects that were taken
            out.
        stack: Objects pushed since the last mark.
        budget: The work that is left for reading.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.budget = PickleBudget(len(data))
        self.memo: Any = []
        self.stack: list[Any] = []
        self._marks: list[list[Any]] = []

    # -- what a subclass decides -----------------------------------------------------------------------------------------

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name. Nothing is imported."""
        raise NotImplementedError

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Return the stand-in for the result of a call."""
        raise NotImplementedError

    def put_items(self, target: Any, items: list[Any]) -> None:
        """Add items, or alternating keys and values, to a record of a class."""
        raise NotImplementedError

    def build(self, target: Any, state: Any) -> None:
        """Set the state of an object."""
        raise NotImplementedError

    def persistent_load(self, reference: Any) -> Any:
        """Return the stand-in for a reference to something outside the pickle."""
        raise NotImplementedError

    def other(self, code: int) -> None:
        """Run an opcode that this class does not support; a subclass may add one of its own."""
        raise UnpicklingError(f"the opcode {code:#04x}, which no pickle of a checkpoint has")

    # -- opcodes ---------------------------------------------------------------------------------------------------------

    def load(self) -> Any:  # noqa: PLR0912, PLR0915 -- calling a function for each opcode doubles the time
        """Run the pickle.

        Raises:
            UnpicklingError: It does something that no checkpoint's pickle does, or its cost is out of proportion.
            IndexError, KeyError, TypeError, ValueError, struct.error: It is cut off or damaged.
        """
        data, memo, stack, rare = self._data, self.memo, self.stack, _RARE
        at = 0
        # In the order of their frequency in a large .metadata.
        while True:
            code = data[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif code == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif code in (0x52, 0x81):  # REDUCE, NEWOBJ
                arguments = stack.pop()
                stack[-1] = self._call(stack[-1], arguments)
            elif code == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif code == 0x28:  # MARK
                self._marks.append(stack)
                stack = []
            elif code == 0x86:  # TUPLE2
                second = stack.pop()
                stack[-1] = (stack[-1], second)
            elif code == 0x75:  # SETITEMS
                items, stack = stack, self._marks.pop()
                self.set_items(stack[-1], items)
            elif code == 0x62:  # BUILD
                state = stack.pop()
                if type(stack[-1]) is Stateful:
                    stack[-1].append(state)
                else:
                    self.build(stack[-1], state)
            elif code == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif code == 0x4D:  # BININT2
                stack.append(data[at] | data[at + 1] << 8)
                at += 2
            elif code == 0x2E:  # STOP
                return stack.pop()
            else:
                self.stack = stack
                run = rare.get(code)
                if run is None:
                    self.other(code)
                else:
                    at = run(self, at)
                stack = self.stack

    def _call(self, function: Any, arguments: Any) -> Any:
        # Most calls in a large .metadata are these two; a size becomes a plain tuple.
        if function is Stateful and arguments == ():
            return Stateful()
        if function is tuple and len(arguments) == 1 and type(arguments[0]) is tuple:
            return arguments[0]
        if type(arguments) is not tuple:
            raise UnpicklingError("a call whose arguments are not a tuple")
        self.budget.charge_parts(len(arguments))
        self.budget.charge(sum(len(item) for item in arguments if type(item) in _SIZED))
        return self.call(function, arguments)

    def _pop_mark(self) -> list[Any]:
        """Return the objects pushed since the last mark, and restore the stack before it."""
        items, self.stack = self.stack, self._marks.pop()
        return items

    def extend(self, target: Any, items: list[Any]) -> None:
        """Append items to a list or a record."""
        if type(target) is list:
            target.extend(items)
        else:
            self.put_items(target, items)

    def add_items(self, target: Any, items: list[Any]) -> None:
        """Add items to a set or a record."""
        if type(target) is not set:
            self.put_items(target, items)
            return
        for item in items:
            self.budget.check_key(item, target)
            target.add(item)

    def set_items(self, target: Any, items: list[Any]) -> None:
        """Set entries of a dict or a record from alternating keys and values."""
        if len(items) & 1:
            raise UnpicklingError("a key without a value")
        if type(target) is not dict and type(target) is not OrderedDict:
            self.put_items(target, items)
            return
        for index in range(0, len(items), 2):
            key = items[index]
            if type(key) is not str:
                self.budget.check_key(key, target)
            target[key] = items[index + 1]

    def _push(self, value: Any, at: int) -> int:
        self.stack.append(value)
        return at

    def _dropped(self, _: Any, at: int) -> int:
        return at

    def _put(self, at: int, width: int) -> int:
        # Python assigns these numbers in order. A number far beyond makes Python's own unpickler allocate gigabytes.
        if int.from_bytes(self._data[at : at + width], "little") != len(self.memo):
            raise UnpicklingError("a memo number out of turn")
        self.memo.append(self.stack[-1])
        return at + width

    def _counted(self, at: int, width: int, make: Callable[[bytes], Any]) -> int:
        """Push the object made from bytes whose number precedes them."""
        begin = at + width
        end = begin + int.from_bytes(self._data[at:begin], "little")
        if end > len(self._data):
            raise UnpicklingError("it ends inside a text, bytes or a number")
        return self._push(make(self._data[begin:end]), end)

    def _tuple3(self, at: int) -> int:
        third, second = self.stack.pop(), self.stack.pop()
        self.stack[-1] = (self.stack[-1], second, third)
        return at

    def _appends(self, at: int) -> int:
        items = self._pop_mark()
        self.extend(self.stack[-1], items)
        return at

    def _append(self, at: int) -> int:
        item = self.stack.pop()
        self.extend(self.stack[-1], [item])
        return at

    def _additems(self, at: int) -> int:
        items = self._pop_mark()
        self.add_items(self.stack[-1], items)
        return at

    def _frozenset(self, at: int) -> int:
        found: set[Any] = set()
        self.add_items(found, self._pop_mark())
        return self._push(frozenset(found), at)

    def _setitem(self, at: int) -> int:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items(self.stack[-1], [key, value])
        return at

    def _stack_global(self, at: int) -> int:
        name, module = self.stack.pop(), self.stack.pop()
        return self._push(self._global(module, name), at)

    def _line_global(self, at: int) -> int:
        middle = self._data.index(b"\n", at)
        end = self._data.index(b"\n", middle + 1)
        module, name = self._data[at:middle], self._data[middle + 1 : end]
        return self._push(self._global(str(module, "utf-8"), str(name, "utf-8")), end + 1)

    def _global(self, module: Any, name: Any) -> Any:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise UnpicklingError("a name that is not text")
        if len(module) + len(name) > _LONGEST_NAME:
            raise UnpicklingError(f"a name of {len(module) + len(name):,} characters")
        return self.find_class(module, name)

    def _protocol(self, at: int) -> int:
        if self._data[at] > 5:
            raise UnpicklingError(f"pickle protocol {self._data[at]}, which is unknown")
        return at + 1


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_RARE: dict[int, Callable[[PickleMachine, int], int]] = {
    0x8C: lambda machine, at: machine._counted(at, 1, _text),  # SHORT_BINUNICODE
    0x58: lambda machine, at: machine._counted(at, 4, _text),  # BINUNICODE
    0x8D: lambda machine, at: machine._counted(at, 8, _text),  # BINUNICODE8
    0x43: lambda machine, at: machine._counted(at, 1, bytes),  # SHORT_BINBYTES
    0x42: lambda machine, at: machine._counted(at, 4, bytes),  # BINBYTES
    0x8E: lambda machine, at: machine._counted(at, 8, bytes),  # BINBYTES8
    0x96: lambda machine, at: machine._counted(at, 8, bytearray),  # BYTEARRAY8
    0x8A: lambda machine, at: machine._counted(at, 1, _number),  # LONG1
    0x8B: lambda machine, at: machine._counted(at, 4, _number),  # LONG4
    0x4A: lambda machine, at: machine._push(_number(machine._data[at : at + 4]), at + 4),  # BININT
    0x47: lambda machine, at: machine._push(struct.unpack_from(">d", machine._data, at)[0], at + 8),  # BINFLOAT
    0x4E: lambda machine, at: machine._push(None, at),  # NONE
    0x88: lambda machine, at: machine._push(True, at),  # NEWTRUE
    0x89: lambda machine, at: machine._push(False, at),  # NEWFALSE
    0x5D: lambda machine, at: machine._push([], at),  # EMPTY_LIST
    0x8F: lambda machine, at: machine._push(set(), at),  # EMPTY_SET
    0x71: lambda machine, at: machine._put(at, 1),  # BINPUT
    0x72: lambda machine, at: machine._put(at, 4),  # LONG_BINPUT
    0x74: lambda machine, at: machine._push(tuple(machine._pop_mark()), at),  # TUPLE
    0x87: PickleMachine._tuple3,  # TUPLE3
    0x65: PickleMachine._appends,  # APPENDS
    0x61: PickleMachine._append,  # APPEND
    0x90: PickleMachine._additems,  # ADDITEMS
    0x91: PickleMachine._frozenset,  # FROZENSET
    0x73: PickleMachine._setitem,  # SETITEM
    0x31: lambda machine, at: machine._dropped(machine._pop_mark(), at),  # POP_MARK
    0x30: lambda machine, at: machine._dropped(machine.stack.pop(), at),  # POP
    0x93: PickleMachine._stack_global,  # STACK_GLOBAL
    0x63: PickleMachine._line_global,  # GLOBAL
    0x51: lambda machine, at: machine._push(machine.persistent_load(machine.stack.pop()), at),  # BINPERSID
    0x80: PickleMachine._protocol,  # PROTO
    0x95: lambda machine, at: at + 8,  # FRAME: the ends of frames do not affect the result
}

"""The layout of the two records that occur once per chunk in ``.metadata``: the positions of their numbers and texts.

The two forms are a chunk's box, and the pair of its key and the place of its bytes. A number takes one, two, four or more bytes,
so each form has a few layouts.
"""

from __future__ import annotations

import pickletools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK, PAIR = 1, 2
MAX_RECORD = 600
MAX_DIMS = 8
Rows = npt.NDArray[np.uint8]
"""Records of one layout: (records, bytes), with whole words of eight bytes."""

# A record as one letter per opcode: n for a number, w a text, m MEMOIZE, f a GET; every other opcode is its own character.
_LETTERS = dict.fromkeys(("BININT1", "BININT2", "BININT", "LONG1"), "n")
_LETTERS |= {"SHORT_BINUNICODE": "w", "MEMOIZE": "m", "BINGET": "f", "LONG_BINGET": "f"}
_HEAD = r"f\)\x81m}m\("
_SIZE = r"f(?:\)|(?:n\x85|nn\x86|nnn\x87|\(n{4,8}t)m)\x85mRm"
_FORMS = {
    CHUNK: re.compile(rf"{_HEAD}f(?P<offsets>{_SIZE})f(?P<sizes>{_SIZE})ub"),
    PAIR: re.compile(rf"{_HEAD}f(?P<name>wm|f)fnf(?P<offsets>{_SIZE})ub{_HEAD}f(?P<file>wm|f)fnfnub"),
}
_TYPES = {"BININT1": "u1", "BININT2": "<u2", "BININT": "<i4", "BINGET": "u1", "LONG_BINGET": "<u4"}
_ALL = np.uint64(2**64 - 1)
_Op = tuple[str, str, Any, int]


@dataclass(frozen=True)
class Value:
    """A number, text or reference in a record: the opcode's name, the position of its payload, and the number of its bytes."""

    code: str
    at: int
    width: int

    def of(self, rows: Rows) -> npt.NDArray[Any]:
        """Return the numbers or references in records, with as many bytes as they have there."""
        if self.code != "LONG1":
            return np.ndarray(len(rows), _TYPES[self.code], rows, self.at, rows.strides[:1])
        wide = np.zeros((len(rows), 8), np.uint8)
        wide[:, 8 - self.width :] = rows[:, self.at : self.at + self.width]
        return wide.view("<i8")[:, 0] >> np.int64(64 - 8 * self.width)  # signed in its own width


@dataclass(frozen=True)
class Layout:
    """The common properties of records of one layout.

    Attributes:
        form: CHUNK or PAIR.
        dims: The number of dims in each size.
        length: The record's length in bytes.
        puts: The number of memo numbers that a record uses.
        gets: The memo numbers of the classes and keys.
        numbers: The positions of the numbers. For a chunk: offsets, sizes; for a pair: index, offsets, start, length.
        name, file: The positions of a pair's texts, or of references to them.
        mask, fixed: The bytes that are the same in all records, as words of eight bytes.
    """

    form: int
    dims: int
    length: int
    puts: int
    gets: tuple[int, ...]
    numbers: tuple[Value, ...]
    name: Value
    file: Value
    mask: npt.NDArray[np.uint64]
    fixed: npt.NDArray[np.uint64]

    def fits(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which rows have this layout, as a mask."""
        words = rows.view("<u8")
        same = np.ones(len(rows), dtype=bool)
        for column, (mask, fixed) in enumerate(zip(self.mask, self.fixed, strict=True)):
            if mask == _ALL:
                same &= words[:, column] == fixed
            elif mask:
                same &= (words[:, column] & mask) == fixed
        return same


def layout_of(data: bytes) -> Layout | None:
    """Return the layout of the record at the beginning of some bytes; None if it has neither form."""
    ops = _opcodes(data)
    letters = "".join(letter for _, letter, _, _ in ops)
    for form, pattern in _FORMS.items():
        match = pattern.match(letters)
        if match is not None and ops[match.end() - 1][3] < MAX_RECORD:
            return _layout(form, match, ops, data)
    return None


def _opcodes(data: bytes) -> list[_Op]:
    """Return name, letter, argument and position of the opcodes of at most two records."""
    ops: list[_Op] = []
    builds = 0
    try:
        for op, argument, at in pickletools.genops(data):
            ops.append((op.name, _LETTERS.get(op.name, op.code), argument, at or 0))
            builds += op.name == "BUILD"
            if builds == 2:
                break
    except ValueError:
        pass  # the bytes after the record are cut off
    return ops


def _layout(form: int, match: re.Match[str], ops: list[_Op], data: bytes) -> Layout | None:
    texts = {match.start(group): group for group in ("name", "file") if group in match.groupdict()}
    numbers: list[Value] = []
    found = dict.fromkeys(("name", "file"), Value("", 0, 0))
    gets: list[int] = []
    length = ops[match.end() - 1][3] + 1
    free = np.zeros(-(-length // 8) * 8, np.uint8)
    free[:length] = 255
    for index, (code, letter, argument, at) in enumerate(ops[: match.end() - 1]):
        begin = at + (2 if code in ("LONG1", "SHORT_BINUNICODE") else 1)
        value = Value(code, begin, ops[index + 1][3] - begin)
        if letter == "n":
            numbers.append(value)
        elif index in texts:
            found[texts[index]] = value
        else:
            if letter == "f":
                gets.append(argument)
            continue
        free[value.at : value.at + value.width] = 0
    dims = {match[group].count("n") for group in ("offsets", "sizes") if group in match.groupdict()}
    if len(dims) != 1 or not all(1 <= value.width <= 8 for value in numbers):
        return None
    mask = free.view("<u8")
    fixed = np.frombuffer(data[: len(free)].ljust(len(free), b"\0"), "<u8") & mask
    return Layout(
        form, dims.pop(), length, match[0].count("m"), tuple(gets), tuple(numbers), found["name"], found["file"], mask, fixed
    )  # fmt: skip

"""Limits on the cost of reading a pickle: total work proportional to its length, and only keys with cheap hashes."""

from __future__ import annotations

from collections import Counter
from pickle import UnpicklingError
from typing import Any

UNITS_PER_BYTE = 16
FREE_UNITS = 1 << 20
_PART_UNITS = 8  # for parts that are examined one by one
_MOST_KEY_DEPTH = 64
MOST_KEY_BITS = 512
_OWN_HASH_BITS = 64  # up to this size, only a handful of numbers can share a hash

# Hashing these has a fixed cost, and many of them cannot be made to collide.
_PLAIN_KEYS = frozenset({str, bytes, bool, type(None), float})


class PickleBudget:
    """The work left for a pickle: 16 units per byte, plus a million so that small pickles can be read.

    A copied item or byte costs one unit. An argument of a call, an item of a set, and a part of a nested key cost eight each.
    Everything else costs about the same for each opcode.

    Args:
        size: The length of the pickle in bytes.
    """

    def __init__(self, size: int) -> None:
        self._left = UNITS_PER_BYTE * size + FREE_UNITS
        self._same_hash: Counter[tuple[int, int]] = Counter()

    def charge(self, units: int) -> None:
        """Pay for work. Raises UnpicklingError once the total exceeds what a pickle of this length may cost."""
        self._left -= units
        if self._left < 0:
            raise UnpicklingError("it asks for far more work than its length allows, by repeating its parts")

    def charge_parts(self, count: int) -> None:
        """Pay for parts that are examined one by one."""
        self.charge(_PART_UNITS * count)

    def check_key(self, key: Any, target: Any) -> None:
        """Pay in advance for hashing a key of a dict or set, because hashing cannot be interrupted.

        Raises:
            UnpicklingError: The key is nested too deep or holds a very long number, or its parts repeat too often.
        """
        kind = type(key)
        if kind in _PLAIN_KEYS:
            return
        if kind is int:
            self._check_number(key)
            if key.bit_length() <= _OWN_HASH_BITS:
                return
        elif isinstance(key, tuple | frozenset):
            self._check_parts(key)
        elif kind is not complex:
            return  # equal only to itself, or unhashable
        # An attacker can choose these hashes (not those of strings), and each key is compared with all earlier keys of the same
        # hash.
        same = id(target), hash(key)
        self.charge_parts(1 + self._same_hash[same])
        self._same_hash[same] += 1

    def _check_parts(self, key: Any) -> None:
        pending = [(key, 1)]
        while pending:
            item, depth = pending.pop()
            self.charge_parts(1 + len(item))
            if depth > _MOST_KEY_DEPTH:
                raise UnpicklingError(f"a key that is nested deeper than {_MOST_KEY_DEPTH} levels")
            for part in item:
                if isinstance(part, tuple | frozenset):
                    pending.append((part, depth + 1))
                elif type(part) is int:
                    self._check_number(part)

    def _check_number(self, number: int) -> None:
        if number.bit_length() > MOST_KEY_BITS:
            raise UnpicklingError(f"a key with a number of {number.bit_length():,} bits")

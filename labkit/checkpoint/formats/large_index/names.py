"""Numbering of the texts in many rows of bytes: equal texts get equal numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from labkit.checkpoint.formats.large_index.parts import Int64s

_FEW = 16


class Names:
    """Texts in the order in which they first occurred.

    Each rank lists its tensors in almost the same order. So one text is looked up, and the rows after it are compared, eight bytes
    at a time, with the texts that followed it earlier. Where they stop agreeing, the next text is looked up.

    Attributes:
        texts: The texts by number, in UTF-8.
    """

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self._known: dict[bytes, int] = {}
        self._sizes: dict[int, _Texts] = {}

    def numbers(self, rows: npt.NDArray[np.uint8], at: int, width: int) -> Int64s:
        """Return the number of the text of ``width`` bytes at ``at`` in each row; at least seven bytes must follow it."""
        texts = self._sizes.setdefault(width, _Texts(width))
        words = [np.ndarray(len(rows), "<u8", rows, at + 8 * index, rows.strides[:1]) for index in range(len(texts.words))]
        if width % 8:
            words[-1] = words[-1] & np.uint64((1 << 8 * (width % 8)) - 1)
        result = np.empty(len(rows), np.int64)
        begin = short = 0
        while begin < len(rows):
            place = self._place(rows[begin, at : at + width].tobytes(), texts)
            end = min(len(rows), begin + len(texts) - place)
            # If the order differs from before, comparing further costs more than looking up.
            end = begin + (1 if short > _FEW else texts.agree(place, [word[begin:end] for word in words]))
            short += end - begin < _FEW
            result[begin:end] = texts.numbers[place : place + end - begin]
            begin = end
        return result

    def _place(self, text: bytes, texts: _Texts) -> int:
        """Return the position of a text among the texts of its length."""
        place = self._known.get(text)
        if place is None:
            place = self._known[text] = texts.add(text, len(self.texts))
            self.texts.append(text)
        return place


class _Texts:
    """The texts of one length: a row for each eight bytes, a column for each text; and the texts' numbers."""

    def __init__(self, width: int) -> None:
        self.words = np.zeros((-(-width // 8), 64), np.uint64)
        self.numbers = np.zeros(64, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, text: bytes, number: int) -> int:
        place, self._count = self._count, self._count + 1
        if place == len(self.numbers):
            self.words, self.numbers = np.pad(self.words, ((0, 0), (0, place))), np.pad(self.numbers, (0, place))
        self.words[:, place] = np.frombuffer(text.ljust(8 * len(self.words), b"\0"), "<u8")
        self.numbers[place] = number
        return place

    def agree(self, place: int, words: list[npt.NDArray[np.uint64]]) -> int:
        """Count how many rows, from the first, hold the texts from ``place`` on; the first row is known to."""
        same = np.ones(len(words[0]), dtype=bool)
        for known, word in zip(self.words, words, strict=True):
            same &= known[place : place + len(word)] == word
        return len(same) if same.all() else int(same.argmin())

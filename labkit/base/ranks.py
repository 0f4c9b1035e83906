"""Sets of ranks, and results with one value per rank."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, SupportsIndex, TypeVar

from labkit.base.plain_text import format_ranks, name_ranks
from labkit.errors import RankSpecError

T = TypeVar("T")

RankSpec = SupportsIndex | str | Iterable[SupportsIndex] | None


def parse_ranks(spec: RankSpec, world_size: int) -> tuple[int, ...]:
    """Read a set of ranks.

    Args:
        spec: None or ``"all"`` for every rank, one rank, an iterable of ranks, or text such as ``"0-3,6"``.
        world_size: The number of ranks; each rank must lie in ``[0, world_size)``.

    Returns:
        The ranks in ascending order, each once.

    Raises:
        RankSpecError: The text cannot be read, the set is empty, or a rank lies outside the world.
    """
    if spec is None or (isinstance(spec, str) and spec.strip() == "all"):
        return tuple(range(world_size))
    if isinstance(spec, str):
        ranks = _parse_text(spec, world_size)
    elif isinstance(spec, Iterable):
        ranks = {_parse_item(item) for item in spec}
    elif isinstance(spec, bool) or not isinstance(spec, SupportsIndex):
        raise RankSpecError(f"{spec!r} is not a rank set. Write a rank such as 0, a list such as [0, 2], or text such as '0-3,6'.")
    else:
        ranks = {spec.__index__()}
    if not ranks:
        raise RankSpecError(f"{spec!r} names no rank. Leave the ranks out to mean all of them.")
    outside = sorted(rank for rank in ranks if not 0 <= rank < world_size)
    if outside:
        plural = "rank" if len(outside) == 1 else "ranks"
        raise RankSpecError(
            f"{plural} {', '.join(map(str, outside))} out of range: this pool has {world_size} "
            f"rank{'s' if world_size != 1 else ''}, 0 to {world_size - 1}."
        )
    return tuple(sorted(ranks))


def _parse_item(item: Any) -> int:
    if isinstance(item, bool) or not isinstance(item, SupportsIndex):
        raise RankSpecError(f"{item!r} is not a rank. Ranks are integers counted from 0.")
    return item.__index__()


def _parse_text(text: str, world_size: int) -> set[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            raise RankSpecError(f"cannot read the rank set {text!r} at {part.strip()!r}. Write it like '0-3,6' or 'all'.") from None
        if high < low:
            raise RankSpecError(f"the range {part.strip()!r} in {text!r} runs backwards. Write the lower rank first.")
        # For a slip such as 0-99999999 the loop stops at the first rank outside the world, which is then reported.
        ranks.update(range(low, min(high, max(low, world_size)) + 1))
    return ranks


class RankResults(Mapping[int, T], Generic[T]):
    """One value per rank, in rank order.

    A mapping from rank to value. ``results[2]`` is rank 2's value; ``list(results.values())`` gives all values in rank order. A
    notebook shows equal values once, with the ranks that hold them.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, T]) -> None:
        self._values = dict(sorted(values.items()))

    def __getitem__(self, rank: int) -> T:
        try:
            return self._values[rank]
        except KeyError:
            raise KeyError(f"no value from rank {rank!r}; this result has ranks {format_ranks(self._values)}") from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that returned a value, in ascending order."""
        return tuple(self._values)

    def same(self) -> T:
        """Return the one value that every rank returned.

        Raises:
            ValueError: The ranks returned different values. Values are compared by ``==``; tensors and arrays by shape, dtype and
                every element, also inside lists, tuples and dicts.
        """
        first, *others = self._values.items()
        for rank, value in others:
            if not _equal(value, first[1]):
                raise ValueError(f"ranks {first[0]} and {rank} returned different values: {_short(first[1])} and {_short(value)}")
        return first[1]

    def __repr__(self) -> str:
        return "\n".join(f"{label}: {text}" for label, text in self._grouped()) or "RankResults()"

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left;vertical-align:top">{label}</th>'
            f'<td style="text-align:left"><pre style="margin:0;font-family:monospace">{html.escape(text)}</pre></td></tr>'
            for label, text in self._grouped()
        )
        return f"<table>{rows}</table>"

    def _grouped(self) -> list[tuple[str, str]]:
        groups: dict[str, list[int]] = {}
        for rank, value in self._values.items():
            groups.setdefault(repr(value), []).append(rank)
        return [(name_ranks(ranks), text) for text, ranks in groups.items()]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_equal(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(_equal, left, right))
    if not (hasattr(left, "shape") or hasattr(right, "shape")):
        return bool(left == right)
    if any(getattr(left, name, None) != getattr(right, name, None) for name in ("shape", "dtype")):
        return False
    # For tensors and arrays, == returns one verdict per element. For tables it raises unless the labels agree.
    verdict = left.equals(right) if hasattr(left, "equals") else left == right
    return bool(verdict.all() if hasattr(verdict, "all") else verdict)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

"""An exact check that chunks cover every element of a tensor once, vectorised over the chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from labkit.checkpoint.index.model import ChunkTable, Int64s


@dataclass(frozen=True, slots=True)
class Coverage:
    """The result of comparing chunks with a tensor.

    Attributes:
        missing: Elements in no chunk.
        doubled: Elements in more than one chunk.
        outside: Indices of chunks that reach outside the tensor.
        gap: A box (offsets, sizes) in no chunk, if there is one.
        overlap: Indices of two overlapping chunks, if there are any.
    """

    missing: int
    doubled: int
    outside: tuple[int, ...] = ()
    gap: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    overlap: tuple[int, int] | None = None

    @property
    def exact(self) -> bool:
        """True if every element is in exactly one chunk and no chunk reaches outside."""
        return not (self.missing or self.doubled or self.outside)


def coverage(chunks: ChunkTable, shape: Sequence[int]) -> Coverage:
    """Compute how the chunks cover a tensor of this shape.

    The chunks' borders divide the tensor into cells; each cell is either entirely inside a chunk or entirely outside. The cells are
    marked layer by layer along the dim with the most borders, so that only one layer is in memory.
    """
    if len(chunks) == 1 and chunks.sizes[0].tolist() == list(shape) and not chunks.offsets.any():
        return Coverage(0, 0)
    low, high = chunks.offsets, chunks.offsets + chunks.sizes
    bounds = np.asarray(shape, dtype=np.int64)
    bad = np.nonzero(((low < 0) | (chunks.sizes < 0) | (high > bounds)).any(axis=1))[0]
    if not shape:
        return Coverage(int(len(chunks) == 0), int(len(chunks) > 1), overlap=(0, 1) if len(chunks) > 1 else None)
    if prod(shape) == 0:
        return Coverage(0, 0, tuple(bad.tolist()))
    solid = np.nonzero((chunks.sizes > 0).all(axis=1))[0]
    low, high = np.clip(low[solid], 0, bounds), np.clip(high[solid], 0, bounds)
    quick = _along_one_dim(low, high, bounds)
    if quick is not None and quick.exact:
        return Coverage(0, 0, tuple(bad.tolist()))
    found = _cells(low, high, bounds)
    overlap = None if found.overlap is None else (int(solid[found.overlap[0]]), int(solid[found.overlap[1]]))
    return Coverage(found.missing, found.doubled, tuple(bad.tolist()), found.gap, overlap)


def _along_one_dim(low: Int64s, high: Int64s, bounds: Int64s) -> Coverage | None:
    """Handle the usual case cheaply: chunks that are slices along one dim. Return None if they are not, or if they leave a gap."""
    partial = [d for d in range(len(bounds)) if bool(((low[:, d] != 0) | (high[:, d] != bounds[d])).any())]
    if len(partial) > 1 or len(low) == 0:
        return None
    dim = partial[0] if partial else 0
    order = np.argsort(low[:, dim], kind="stable")
    starts, ends = low[order, dim], high[order, dim]
    exact = starts[0] == 0 and ends[-1] == bounds[dim] and bool((starts[1:] == ends[:-1]).all())
    return Coverage(0, 0) if exact else None


def _cells(low: Int64s, high: Int64s, bounds: Int64s) -> Coverage:
    dims = len(bounds)
    cuts = [np.unique(np.concatenate([low[:, d], high[:, d], [0, bounds[d]]])) for d in range(dims)]
    first = [np.searchsorted(cuts[d], low[:, d]) for d in range(dims)]
    last = [np.searchsorted(cuts[d], high[:, d]) for d in range(dims)]
    main = max(range(dims), key=lambda d: len(cuts[d]))
    others = [d for d in range(dims) if d != main]
    layer_volume = np.ones([len(cuts[d]) - 1 for d in others], dtype=np.int64)
    for axis, d in enumerate(others):
        layer_volume = layer_volume * np.diff(cuts[d]).reshape([-1 if a == axis else 1 for a in range(len(others))])
    missing = doubled = 0
    gap: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    overlap: tuple[int, int] | None = None
    for step in range(len(cuts[main]) - 1):
        thick = int(cuts[main][step + 1] - cuts[main][step])
        here = np.nonzero((first[main] <= step) & (last[main] > step))[0]
        owner = np.full(layer_volume.shape, -1, dtype=np.int64)
        for chunk in here:
            window = tuple(slice(int(first[d][chunk]), int(last[d][chunk])) for d in others)
            taken = owner[window] >= 0
            if taken.any():
                doubled += int(layer_volume[window][taken].sum()) * thick
                overlap = overlap or (int(owner[window][taken].reshape(-1)[0]), int(chunk))
            owner[window] = chunk
        free = owner < 0
        if free.any():
            missing += int(layer_volume[free].sum()) * thick
            gap = gap or _gap(free, cuts, main, others, step)
    return Coverage(missing, doubled, (), gap, overlap)


def _gap(
    free: npt.NDArray[np.bool_], cuts: list[Int64s], main: int, others: list[int], step: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    at = dict(zip(others, np.argwhere(free)[0].tolist() if others else [], strict=True))
    at[main] = step
    offsets = tuple(int(cuts[d][at[d]]) for d in range(len(cuts)))
    sizes = tuple(int(cuts[d][at[d] + 1] - cuts[d][at[d]]) for d in range(len(cuts)))
    return offsets, sizes

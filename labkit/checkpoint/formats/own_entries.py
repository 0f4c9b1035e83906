"""Detection of rank-specific entries in files that otherwise agree: random states, and shares of flattened moments.

Random states are recognised by the form that torch, Python and numpy give them, never by the names that users give them:

| generator | form |
| --- | --- |
| torch's on the CPU, on a GPU | a vector of 5,056 or 16 bytes |
| Python's | version 3, 625 numbers, and a cached Gaussian |
| numpy's old one | ``MT19937``, an array, and a cached Gaussian |
| numpy's others | a dict with ``bit_generator`` beside its ``state`` |

:class:`labkit.checkpoint.PerRank` marks the rest: its entries have the rank's number, ``rank_3``, as their second key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from labkit.checkpoint.index.model import Checkpoint, Path_, TensorEntry
from labkit.checkpoint.index.sections import is_moment_piece

_TORCH_SHAPES = ((5056,), (16,))
_PYTHON_NUMBERS = 625


def own_entries(content: Checkpoint, rank: int) -> set[str]:
    """Return the keys of a rank's own entries in its file, by this module's table.

    Args:
        content: The file's entries, with their values.
        rank: The number that may be the rank of the file.
    """
    paths: dict[str, Path_] = {key: entry.path for key, entry in content.tensors.items()}
    paths |= {key: entry.path for key, entry in content.values.items()}
    generators = {path[:-1] for path in paths.values() if path[-1] == "bit_generator"}
    generators &= {path[:at] for path in paths.values() for at in range(len(path)) if path[at] == "state"}
    own = {key for key, path in paths.items() if path[1:2] == (f"rank_{rank}",)}
    own |= {key for key, path in paths.items() if any(path[:at] in generators for at in range(len(path)))}
    own |= {key for key, entry in content.tensors.items() if entry.dtype == torch.uint8 and entry.shape in _TORCH_SHAPES}
    return own | {key for key, entry in content.values.items() if _is_random_state(entry.inline)}


def shares_of(contents: Sequence[Checkpoint]) -> tuple[set[str], set[str]]:
    """Return the moments that are shares of flattened ones and, if there are such, the numbered state that only some ranks have."""
    lengths: dict[str, set[tuple[int, ...]]] = {}
    for content in contents:
        for entry in content.section("optimizer"):
            if is_moment_piece(entry):
                lengths.setdefault(entry.key, set()).add(entry.shape)
    weights = {entry.shape for content in contents for entry in content.section("model")}
    shares = {key for key, found in lengths.items() if len(found) > 1 or not found & weights}
    states = [{entry.key for entry in content.section("optimizer") if _is_numbered(entry)} for content in contents]
    return shares, states[0].union(*states) - states[0].intersection(*states) if shares else set()


def _is_numbered(entry: TensorEntry) -> bool:
    return any(str(key).isdigit() for key in entry.path[-2:-1])


def _is_random_state(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    if value[0] == "MT19937":
        return len(value) == 5
    return len(value) == 3 and value[0] == 3 and isinstance(value[1], list | tuple) and len(value[1]) == _PYTHON_NUMBERS

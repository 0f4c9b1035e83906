"""Traversal of nested state: the leaves of a model's or an optimizer's state dict, each with its path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

Path = tuple[Any, ...]


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) for every value except mappings, lists and tuples, in insertion order.

    An empty container is a leaf too, so that trees with equal leaves have equal shapes. Path parts keep their type: the integer 0
    and the text "0" are different keys, and torch's optimizer dicts break if one becomes the other. A module is replaced by its
    ``state_dict()``.
    """
    if isinstance(tree, nn.Module):
        tree = tree.state_dict()
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, (list, tuple)) and tree:
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))
    else:
        yield path, tree


def path_text(path: Path) -> str:
    """Format a path for people: join the parts by ``/``, with ``'0'`` in quotes to tell it from the integer 0."""
    return "/".join(part if isinstance(part, str) and not part.isdigit() else repr(part) for part in path) or "(the value itself)"

"""Advice on entries whose pickles ask for code: how to leave them out, and how to keep the weights of a pickled module."""

from __future__ import annotations

from typing import Any

from labkit.checkpoint.index.model import Checkpoint
from labkit.checkpoint.pickles.pickle_records import Class, Record
from labkit.checkpoint.wording import listed, quoted

_MOST = 8
_TRUST = "Where the code that it asks for is installed, and if you trust who made the file"


def way_without(checkpoint: Checkpoint | None) -> str:
    """Return the advice for a checkpoint that asks for code.

    Args:
        checkpoint: The checkpoint, opened without reading such entries; None if even that fails.
    """
    found = {key: value.inline for key, value in checkpoint.values.items() if _asks(value.inline)} if checkpoint is not None else {}
    modules = [key for key, content in found.items() if isinstance(content, Record) and "_modules" in content.state]
    if checkpoint is not None and not checkpoint.tensors and [value.path for value in checkpoint.values.values()] == [("value",)]:
        if modules:
            return f"It is a whole module. {_TRUST}, load it with torch, and save its state_dict() instead."
        return f"It is a whole object. {_TRUST}, load it with torch, and save what is in it as plain data."
    drops = " ".join(f"--drop {quoted(key)}" for key in list(found)[:_MOST]) or "--drop NAME"
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    advice = f"To go on without it, pass despite=['unsafe'] and leave it out with drop (--despite unsafe {drops}{more})."
    if modules:
        its = f"its state_dict() in place of {listed(modules)}"
        advice += (
            f" That leaves out the weights of a whole module. To keep them: {_TRUST.lower()}, load it with torch, and save {its}."
        )
    return advice


def _asks(content: Any) -> bool:
    """Return whether something read from a pickle names a class outside the allow-list."""
    seen: set[int] = set()
    waiting = [content]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Class) and item.opaque:
            return True
        if isinstance(item, Record):
            waiting += [item.kind, *item.args, item.state, *item.items]
        elif isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
    return False

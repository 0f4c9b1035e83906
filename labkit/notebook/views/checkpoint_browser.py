"""A browser for checkpoints: tensors as a tree that unfolds and, per tensor, which rank wrote which box into which file.

The tree is plain HTML that unfolds without a kernel, by mouse or keyboard, also in a saved notebook. If a person watches the
notebook, there is a filter above it.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from labkit.base.plain_text import printable
from labkit.notebook.drawing.style import rank_style, text_table
from labkit.notebook.pictures.bars import scale_for
from labkit.notebook.views.explore import FreeText, explore

# Classes of labkit.checkpoint.index.model, which imports torch. This module does not import torch, not even for types.
Checkpoint: TypeAlias = Any
TensorEntry: TypeAlias = Any
Chunk: TypeAlias = Any

# A page of some hundred KiB still opens at once. Tensors that are left out are counted, and the filter finds them.
MAX_TENSORS = 150
MAX_SHARDS = 32
ALL = "all"
_WIDTH_PX, _ROW_PX = 360, 16


@dataclass
class NameBranch:
    """A part of the names that several tensors share.

    Attributes:
        name: The part of the names between two dots, or several parts if the tree does not branch between them.
        children: The nodes and tensors below it, in the checkpoint's order. A tensor's key is the rest of its name; a node's key is
            its name and a dot.
    """

    name: str
    children: dict[str, Any] = field(default_factory=dict)

    def entries(self) -> Iterator[TensorEntry]:
        """Yield all tensors below this node."""
        for child in self.children.values():
            if isinstance(child, NameBranch):
                yield from child.entries()
            else:
                yield child


def tree_of(entries: Sequence[TensorEntry]) -> NameBranch:
    """Arrange tensors by the parts of their names."""
    root = NameBranch("")
    for entry in entries:
        *parts, last = entry.key.split(".")
        node = root
        for part in parts:
            # Keep the dot in the key: a tensor's whole name may be the beginning of other names.
            node = node.children.setdefault(f"{part}.", NameBranch(part))
        node.children[last] = entry
    return _joined(root)


def _joined(node: NameBranch) -> NameBranch:
    """Join nodes between which the tree does not branch, and merge a node of one tensor into the tensor's name."""
    joined = NameBranch(node.name)
    for name, child in node.children.items():
        below = _joined(child) if isinstance(child, NameBranch) else child
        if isinstance(below, NameBranch) and len(below.children) == 1:
            ((last, only),) = below.children.items()
            below = NameBranch(f"{below.name}.{only.name}", only.children) if isinstance(only, NameBranch) else only
            joined.children[f"{name}{last}"] = below
        else:
            joined.children[name] = below
    return joined


class CheckpointTree:
    """The chosen tensors of a checkpoint, ready to be shown.

    Args:
        checkpoint: A result of `labkit.checkpoint.open_checkpoint`.
        name: A part of the name, or a pattern with ``*`` and ``?``; empty for all.
        section: ``model``, ``optimizer``, ``other`` or `ALL`.
    """

    def __init__(self, checkpoint: Checkpoint, name: str = "", section: str = ALL) -> None:
        pattern = name if "*" in name or "?" in name else f"*{name}*"
        self.found = [
            entry for entry in checkpoint.tensors.values() if fnmatchcase(entry.key, pattern) and section in (ALL, entry.section)
        ]
        self._total = len(checkpoint.tensors)
        self._shown = self.found[:MAX_TENSORS]

    def to_text(self) -> str:
        """Return an aligned table with one line per tensor."""
        rows = [(printable(entry.key), *_facts(entry), str(len(entry.chunks))) for entry in self._shown]
        table = text_table(("tensor", "shape", "dtype", "size", "shards"), rows) if rows else []
        return "\n".join([self._summary(), *table, *self._rest()])

    def to_html(self) -> str:
        """Return the tree as HTML, in which each branch and each tensor unfolds."""
        rest = "".join(f"<p>{line}</p>" for line in self._rest())
        tree = _node_html(tree_of(self._shown), unfold=len(self.found) <= 8, depth=0)
        return f'<div role="group" aria-label="Tensors of a checkpoint"><p>{self._summary()}</p>{tree}{rest}</div>'

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict[str, str], dict[str, object]]:
        return {"text/html": self.to_html(), "text/plain": self.to_text()}, {}

    def _summary(self) -> str:
        size = _size(sum(entry.size_bytes for entry in self.found if entry.tied_to is None))
        return f"{len(self.found):,} of {self._total:,} tensors, {size}"

    def _rest(self) -> list[str]:
        left_out = len(self.found) - len(self._shown)
        return [f"and {left_out:,} more; a filter by name shows them"] if left_out else []


def browse(checkpoint: Checkpoint, *, name: str = "", section: str = ALL) -> None:
    """Show the tensors of a checkpoint as a tree. If a person watches the notebook, add a filter by name and by part.

    Args:
        checkpoint: A result of `labkit.checkpoint.open_checkpoint`. No tensor is read.
        name: The filter to begin with: a part of the name, or a pattern with ``*`` and ``?``.
        section: The part to begin with: ``all``, ``model``, ``optimizer`` or ``other``.

    Raises:
        ControlError: The checkpoint has no such part.

    Ranks: controller or local.
    """
    sections = [ALL, *dict.fromkeys(entry.section for entry in checkpoint.tensors.values())]
    explore(
        lambda name, part: CheckpointTree(checkpoint, name, part),
        {"name": FreeText("part of a name, or *.weight"), "part": sections},
        {"name": name, "part": section},
    )


# HTML ----------------------------------------------------------------------------------------------------------------


def _node_html(node: NameBranch, *, unfold: bool, depth: int) -> str:
    inner = "".join(
        _node_html(child, unfold=unfold, depth=depth + 1)
        if isinstance(child, NameBranch)
        else _entry_html(name, child, unfold=unfold)
        for name, child in node.children.items()
    )
    if depth == 0:
        return inner
    below = list(node.entries())
    size = _size(sum(entry.size_bytes for entry in below if entry.tied_to is None))
    summary = f"<b>{_text(node.name)}</b> <small>{len(below):,} tensor{'s' * (len(below) > 1)}, {size}</small>"
    return _details(summary, inner, unfold=unfold or depth == 1)


def _entry_html(last: str, entry: TensorEntry, *, unfold: bool) -> str:
    shape, dtype, size = _facts(entry)
    tied = f" = {_text(entry.tied_to)}" if entry.tied_to is not None else ""
    summary = f"<code>{_text(last)}</code>{tied} <small>{shape}, {dtype}, {size}, {_shards(len(entry.chunks))}</small>"
    return _details(summary, _shards_html(entry), unfold=unfold)


def _details(summary: str, inner: str, *, unfold: bool) -> str:
    return f'<details{" open" * unfold} style="margin-left:1.2em"><summary>{summary}</summary>{inner}</details>'


def _shards_html(entry: TensorEntry) -> str:
    """Return a map of the shards, and a table of their boxes."""
    chunks = list(entry.chunks[:MAX_SHARDS])
    head = "".join(f'<th scope="col">{name}</th>' for name in ("holds", "written by", "file", "at byte", "bytes"))
    rows = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in (box_of(chunk), *_place(chunk))) + "</tr>" for chunk in chunks
    )
    more = f"<p>and {len(entry.chunks) - len(chunks):,} more shards</p>" if len(entry.chunks) > len(chunks) else ""
    return f"{_map_html(entry, chunks)}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def _map_html(entry: TensorEntry, chunks: Sequence[Chunk]) -> str:
    """Draw the shards as boxes: dim 0 from top to bottom, dim 1 from left to right. A screen reader reads the table instead."""
    if len(chunks) < 2:
        return ""
    files = {chunk.file: place for place, chunk in enumerate(chunks)}
    bands = len({chunk.offsets[:1] for chunk in chunks})
    boxes = []
    for chunk in chunks:
        style = rank_style(files[chunk.file] if chunk.writer is None else chunk.writer)
        top, height = _fraction(entry, chunk, 0)
        left, width = _fraction(entry, chunk, 1)
        who = _text(_place(chunk)[0])
        boxes.append(
            f'<span title="{_text(box_of(chunk))}, {who}" style="position:absolute;left:{left:.2%};top:{top:.2%};width:{width:.2%};'
            f"height:{height:.2%};box-sizing:border-box;border:1px solid white;background:{style.color};color:{style.text_color};"
            f'font-size:10px;line-height:{_ROW_PX - 2}px;text-align:center;overflow:hidden">{who}</span>'
        )
    size = f"width:{_WIDTH_PX}px;max-width:100%;height:{max(2, bands) * _ROW_PX}px"
    return f'<div aria-hidden="true" style="position:relative;{size};margin:4px 0">{"".join(boxes)}</div>'


def _fraction(entry: TensorEntry, chunk: Chunk, dim: int) -> tuple[float, float]:
    if dim >= len(entry.shape) or entry.shape[dim] == 0:
        return 0.0, 1.0
    return chunk.offsets[dim] / entry.shape[dim], chunk.sizes[dim] / entry.shape[dim]


# Words ---------------------------------------------------------------------------------------------------------------


def box_of(chunk: Chunk) -> str:
    """Return the part of the tensor that a chunk holds, as indices: ``[0:4, 0:8]``; ``all`` for a scalar."""
    spans = ", ".join(f"{offset}:{offset + size}" for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"[{spans}]" if spans else "all"


def _place(chunk: Chunk) -> tuple[str, str, str, str]:
    writer = "-" if chunk.writer is None else f"rank {chunk.writer}"
    return writer, chunk.file, f"{chunk.start:,}", f"{chunk.length:,}"


def _facts(entry: TensorEntry) -> tuple[str, str, str]:
    shape = "x".join(map(str, entry.shape)) or "scalar"
    return shape, str(entry.dtype).removeprefix("torch."), _size(entry.size_bytes)


def _shards(count: int) -> str:
    return f"{count:,} shard{'s' * (count != 1)}"


def _size(size_bytes: int) -> str:
    scale, unit = scale_for(size_bytes)
    return f"{size_bytes:,} bytes" if scale == 1 else f"{size_bytes / scale:.1f} {unit}"


def _text(text: str) -> str:
    return html.escape(printable(text), quote=True)

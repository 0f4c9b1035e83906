"""A picture of where a checkpoint's bytes are, in plain HTML and SVG that a saved notebook shows without any script."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence

from labkit.base.plain_text import printable
from labkit.checkpoint.index.model import Checkpoint, Section
from labkit.checkpoint.views.describe import totals
from labkit.checkpoint.views.table import KINDS
from labkit.checkpoint.wording import bytes_text, counted

# Okabe and Ito's colours; the patterns tell the parts apart in black and white.
_COLOURS: Mapping[Section, str] = {"model": "#0072B2", "optimizer": "#E69F00", "other": "#999999"}
_WIDTH, _ROW, _LABEL = 620, 20, 190
MAX_FILES = 24


def file_shares(checkpoint: Checkpoint) -> dict[str, dict[Section, int]]:
    """Return the bytes of model, optimizer and other tensors in each file."""
    shares: dict[str, dict[Section, int]] = {name: {} for name in checkpoint.files}
    for entry in checkpoint.tensors.values():
        if entry.tied_to is not None:
            continue
        table = entry.chunks
        sizes = table.sizes.prod(axis=1) * entry.dtype.itemsize if len(table) else table.starts
        for file_id, size in zip(table.file_ids.tolist(), sizes.tolist(), strict=True):
            part = shares.setdefault(table.files[file_id], {})
            part[entry.section] = part.get(entry.section, 0) + int(size)
    return {name: part for name, part in shares.items() if part}


def checkpoint_svg(checkpoint: Checkpoint) -> str:
    """Draw one bar per file with the bytes of each section. At most 24 files are drawn; a line of text counts the rest."""
    shares = file_shares(checkpoint)
    names = list(shares)[:MAX_FILES]
    largest = max((sum(shares[name].values()) for name in names), default=1) or 1
    height = _ROW * len(names) + 44
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="11" role="img">',
        f"<title>{_text(f'{KINDS[checkpoint.kind]}: bytes by file')}</title>",
        *_legend([section for section in _COLOURS if any(shares[name].get(section) for name in names)]),
    ]
    for row, name in enumerate(names):
        lines += _bar(name, shares[name], largest, 28 + row * _ROW)
    if len(shares) > len(names):
        more = counted(len(shares) - len(names), "more file")
        lines.append(f'<text x="0" y="{height - 4}" fill="currentColor">and {more}</text>')
    return "\n".join([*lines, "</svg>"])


def _legend(sections: Sequence[Section]) -> list[str]:
    parts, x = [], _LABEL
    for section in sections:
        parts.append(f'<rect x="{x}" y="4" width="12" height="12" fill="{_COLOURS[section]}" {_edge(section)}/>')
        parts.append(f'<text x="{x + 17}" y="14" fill="currentColor">{section}</text>')
        x += 100
    return parts


def _edge(section: Section) -> str:
    dashes = {"model": "", "optimizer": 'stroke-dasharray="3 2"', "other": 'stroke-dasharray="1 2"'}
    return f'stroke="#000" stroke-width="1" {dashes[section]}'


def _bar(name: str, share: Mapping[Section, int], largest: int, y: int) -> list[str]:
    room = _WIDTH - _LABEL - 80
    short = name if len(name) <= 30 else name[:13] + "..." + name[-14:]
    parts = [f'<text x="{_LABEL - 6}" y="{y + 12}" text-anchor="end" fill="currentColor">{_text(short)}</text>']
    x = float(_LABEL)
    for section, colour in _COLOURS.items():
        width = share.get(section, 0) / largest * room
        if width:
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 6}" fill="{colour}" {_edge(section)}/>'
            )
            x += width
    parts.append(f'<text x="{x + 6:.1f}" y="{y + 12}" fill="currentColor">{bytes_text(sum(share.values()))}</text>')
    return parts


def _text(text: str) -> str:
    return html.escape(printable(text))


def checkpoint_html(checkpoint: Checkpoint, *, rows: int = 12) -> str:
    """Return the picture with a summary above and the first tensors below, for a notebook cell."""
    numbers = totals(checkpoint)
    step = "" if checkpoint.step is None else f", step {checkpoint.step}"
    head = (
        f"{KINDS[checkpoint.kind]}{step}: {counted(numbers['num_tensors'], 'tensor')}, {bytes_text(numbers['size_bytes'])}, "
        f"{counted(numbers['num_chunks'], 'chunk')} in {counted(numbers['num_files'], 'file')}"
    )
    entries = list(checkpoint.tensors.values())
    body = [
        _row([entry.key, _shape(entry.shape), str(entry.dtype), bytes_text(entry.size_bytes), str(len(entry.chunks))])
        for entry in entries[:rows]
    ]
    more = f"<p>and {counted(len(entries) - rows, 'more tensor')}</p>" if len(entries) > rows else ""
    table = f"<table>{_row(['name', 'shape', 'dtype', 'size', 'shards'], tag='th')}{''.join(body)}</table>"
    # Use an image, because JupyterLab removes inline SVG from untrusted notebooks.
    data = base64.b64encode(checkpoint_svg(checkpoint).encode()).decode()
    sizes = ", ".join(
        f"{name} {bytes_text(sum(share.values()))}" for name, share in list(file_shares(checkpoint).items())[:MAX_FILES]
    )
    alt = html.escape(f"Bytes by file: {printable(sizes)}", quote=True)
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{alt}" style="max-width:100%;background:white">'
    return f"<div><p>{_text(head)}</p>{image}{table}{more}</div>"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _row(cells: Sequence[str], tag: str = "td") -> str:
    name, *rest = map(_text, cells)
    name = name.replace(".", ".<wbr>")  # on a narrow page a long name may wrap after a dot
    return "<tr>" + "".join(f'<{tag} style="text-align:left">{cell}</{tag}>' for cell in (name, *rest)) + "</tr>"

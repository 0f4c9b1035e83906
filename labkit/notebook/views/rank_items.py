"""The output of the ranks in one run, rank by rank, and its form as tabs in plain HTML."""

from __future__ import annotations

import base64
import html
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.base.plain_text import name_ranks

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PRE = '<pre tabindex="0" style="margin:0;max-height:30em;overflow:auto;white-space:pre-wrap">'


@dataclass
class Item:
    """A piece of one rank's output: text, or a display.

    Attributes:
        text: The text; for a display, its plain text.
        data: The mime bundle of a display, None for text.
        display_id: The display's name if it may be updated.
    """

    text: str
    data: dict[str, Any] | None = None
    display_id: str | None = field(default=None, compare=False)


class RankItems:
    """The output of each rank, in order."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.by_rank: dict[int, list[Item]] = {rank: [] for rank in ranks}

    def add_text(self, rank: int, text: str) -> None:
        """Append text to the rank's output."""
        items = self.by_rank.setdefault(rank, [])
        if items and items[-1].data is None:
            items[-1].text += text
        else:
            items.append(Item(text))

    def add_display(self, rank: int, data: dict[str, Any], display_id: str | None, update: bool) -> None:
        """Add a display, or change the one with that name."""
        items = self.by_rank.setdefault(rank, [])
        new = Item(str(data.get("text/plain", "")), data, display_id)
        if update:
            items[:] = [new if item.display_id == display_id else item for item in items]
        else:
            items.append(new)

    def clear(self, rank: int | None) -> None:
        """Forget the output of a rank, or of all ranks if the rank is None."""
        for owner, items in self.by_rank.items():
            if rank is None or owner == rank:
                items.clear()

    def groups(self) -> list[tuple[list[int], list[Item]]]:
        """Group ranks with equal output, ordered by the first rank of each group. Leave out ranks without output."""
        found: list[tuple[list[int], list[Item]]] = []
        for rank, items in sorted(self.by_rank.items()):
            if not items:
                continue
            for ranks, others in found:
                if others == items:
                    ranks.append(rank)
                    break
            else:
                found.append(([rank], items))
        return found


# What is shown -------------------------------------------------------------------------------------------------------


def tabs_text(items: RankItems) -> str:
    """Return the tabs as text, one below the other."""
    return "\n".join(
        f"{name_ranks(ranks)}:\n" + "\n".join(item.text.rstrip("\n") for item in parts) for ranks, parts in items.groups()
    )


def tabs_html(items: RankItems) -> str:
    """Return the tabs in HTML without script. If a page removes style sheets, all parts are shown below each other."""
    groups, name = items.groups(), f"labkit-{uuid.uuid4().hex[:8]}"
    parts = [
        f'<section aria-label="{name_ranks(ranks)}"><b>{name_ranks(ranks)}</b>{items_html(part)}</section>'
        for ranks, part in groups
    ]
    if len(groups) < 2:
        return "".join(parts)
    heads = "".join(
        # Without this JupyterLab would take the arrow keys for itself.
        f'<input type="radio" data-lm-suppress-shortcuts="true" name="{name}" id="{name}-{number}"{" checked" * (number == 0)}>'
        f'<label for="{name}-{number}">{name_ranks(ranks)}</label>'
        for number, (ranks, _) in enumerate(groups)
    )
    return f'<div id="{name}" role="group" aria-label="Output by rank">{_style(name, len(groups))}{heads}{"".join(parts)}</div>'


def _style(name: str, count: int) -> str:
    shown = ",".join(f"#{name}>input:nth-of-type({n}):checked~section:nth-of-type({n})" for n in range(1, count + 1))
    return (
        "<style>"
        f"#{name}>input{{position:absolute;opacity:0;margin:0}}"
        f"#{name}>label{{display:inline-block;padding:2px 12px;cursor:pointer;border-bottom:3px solid transparent}}"
        f"#{name}>input:checked+label{{font-weight:bold;border-bottom-color:#0072B2}}"
        f"#{name}>input:focus-visible+label{{outline:2px solid #0072B2;outline-offset:-2px}}"
        f"#{name}>section{{display:none;border-top:1px solid #76767688;padding:6px 0}}#{name}>section>b{{display:none}}"
        f"{shown}{{display:block}}"
        f"@media print{{#{name}>label{{display:none}}#{name}>section,#{name}>section>b{{display:block!important}}}}"
        "</style>"
    )


def items_html(items: Sequence[Item]) -> str:
    """Return one rank's output in HTML."""
    return "".join(_item_html(item) for item in items)


def _item_html(item: Item) -> str:
    data = item.data or {}
    if "text/html" in data:
        return f"<div>{data['text/html']}</div>"
    alt = html.escape(item.text, quote=True)
    if "image/svg+xml" in data:
        encoded = base64.b64encode(str(data["image/svg+xml"]).encode()).decode()
        return f'<img alt="{alt}" src="data:image/svg+xml;base64,{encoded}">'
    for mime in ("image/png", "image/jpeg"):
        if mime in data:
            return f'<img alt="{alt}" src="data:{mime};base64,{data[mime]}">'
    return f"{_PRE}{html.escape(_ANSI.sub('', item.text))}</pre>"

"""Which machines of an attached pool have come, and the command that brings them, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

from labkit.controller.launch_text import Launch
from labkit.controller.nodes import Node

_CELL = 'style="text-align:left;padding:2px 14px 2px 0"'


def arrival_text(launch: Launch, nodes: Sequence[Node]) -> str:
    """Command and table for terminals and saved notebooks."""
    there = sum(node.reachable for node in nodes)
    head = [f"{there} of {len(nodes)} machines are here. Run on each, with a copy of the key file (mode 0600):"]
    head += ["", f"  {launch.torchrun()}", ""]
    return "\n".join(head + [f"  {node.name}: {_state(node)}" for node in nodes])


def arrival_html(launch: Launch, nodes: Sequence[Node]) -> str:
    """The same for a notebook; the button copies the command."""
    there = sum(node.reachable for node in nodes)
    command = html.escape(launch.torchrun())
    copy = "navigator.clipboard.writeText(this.previousElementSibling.textContent);this.textContent='Copied'"
    rows = "".join(
        f'<tr><th scope="row" {_CELL}>{html.escape(node.name)}</th><td {_CELL}>{_state(node)}</td></tr>' for node in nodes
    )
    return (
        f"<div><div>{there} of {len(nodes)} machines are here. Run on each, with a copy of the key file (mode 0600):</div>"
        f'<div style="display:flex;gap:8px;align-items:start;margin:6px 0"><code style="white-space:pre-wrap">{command}</code>'
        f'<button type="button" style="flex:none" onclick="{copy}">Copy</button></div><table>{rows}</table></div>'
    )


def _state(node: Node) -> str:
    if node.fault:
        return f"✕ {node.fault}"
    if not node.reachable:
        return "○ not here yet" if node.arrived is None else "✕ out of reach"
    assert node.arrived is not None
    gpus = node.arrived.num_gpus
    return f"● here, {gpus} GPU{'s' if gpus != 1 else ''}" if gpus else "● here, no GPU"

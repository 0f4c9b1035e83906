"""The machines of an attached pool that have connected, and the command that starts their agents, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import replace

from labkit.controller.machines.launch_text import TRUST, Launch
from labkit.controller.machines.node import Node

_CELL = 'style="text-align:left;padding:2px 14px 2px 0"'


def arrival_text(launch: Launch | None, nodes: Sequence[Node]) -> str:
    """Return the command, if there is one, and the table of machines, for terminals and saved notebooks."""
    head = [_head(launch, nodes)]
    if launch is not None:
        scheduled = f"Or let a scheduler do it (slurm or kubernetes): {launch.writer('slurm')}"
        head += ["", f"  {launch.command()}", "", scheduled, "", TRUST, ""]
    return "\n".join(head + [f"  {node.name}: {_state(node)}" for node in nodes])


def arrival_html(launch: Launch | None, nodes: Sequence[Node]) -> str:
    """Return the same as HTML for a notebook, with the files for schedulers and buttons that copy them."""
    rows = "".join(
        f'<tr><th scope="row" {_CELL}>{html.escape(node.name)}</th><td {_CELL}>{_state(node)}</td></tr>' for node in nodes
    )
    command = ""
    if launch is not None:
        in_pods = replace(launch, key_file="/etc/labkit/labkit.key")
        command = _copied(launch.command())
        for title, text in (("a batch script for SLURM", launch.slurm()), ("a manifest for Kubernetes", in_pods.kubernetes())):
            command += f"<details><summary>or {title}</summary>{_copied(text)}</details>"
        command += f'<div style="margin:6px 0">{html.escape(TRUST)}</div>'
    return f'<div><div>{_head(launch, nodes)}</div>{command}<table style="margin-top:6px">{rows}</table></div>'


def _copied(text: str) -> str:
    copy = "navigator.clipboard.writeText(this.previousElementSibling.textContent);this.textContent='Copied'"
    return (
        '<div style="display:flex;gap:8px;align-items:start;margin:6px 0">'
        f'<code style="white-space:pre-wrap">{html.escape(text.rstrip())}</code>'
        f'<button type="button" style="flex:none" onclick="{copy}">Copy</button></div>'
    )


def _head(launch: Launch | None, nodes: Sequence[Node]) -> str:
    there = f"{sum(node.reachable for node in nodes)} of {len(nodes)} machines are here."
    return there if launch is None else f"{there} Run on each, with a copy of the key file (mode 0600):"


def _state(node: Node) -> str:
    if not node.reachable:
        return "○ not here yet" if node.arrived is None else "✕ out of reach"
    assert node.arrived is not None
    gpus = node.arrived.num_gpus
    return f"● here, {gpus} GPU{'s' if gpus != 1 else ''}" if gpus else "● here, no GPU"

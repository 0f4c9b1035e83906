"""The screens that show the ranks' output: the running cell, or a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from labkit.base.plain_text import name_ranks
from labkit.wire.messages import StreamName


class Screen(Protocol):
    """A place where output appears, labelled with its rank. None means no label: the pool has one rank, or all are meant."""

    def text(self, name: StreamName, text: str, rank: int | None = None) -> None:
        """Show complete lines of a rank."""

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, rank: int | None = None
    ) -> None:
        """Show or update a mime bundle of a rank."""

    def clear(self, wait: bool, rank: int | None = None) -> None:
        """Clear a rank's output, or all output if the rank is None. With ``wait``, clear only when its next output comes."""


class TerminalScreen:
    """Plain standard streams, for scripts and terminals.

    Args:
        places: The machine of each rank, if there is more than one machine.
    """

    def __init__(self, places: Mapping[int, str] | None = None) -> None:
        self._places = places or {}

    def text(self, name: StreamName, text: str, rank: int | None = None) -> None:
        """Write to the stream of that name, with the rank in front of each line."""
        stream = sys.stdout if name == "stdout" else sys.stderr
        stream.write(labelled(text, rank, self._places))
        stream.flush()

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, rank: int | None = None
    ) -> None:
        """Write the bundle's text below the rank's name."""
        if "text/plain" in data and not update:
            owner = "" if rank is None else f"{heading((rank,))['text/plain']}\n"
            self.text("stdout", f"{owner}{data['text/plain']}\n")

    def clear(self, wait: bool, rank: int | None = None) -> None:
        """Do nothing: a terminal keeps what it has shown."""


class NotebookScreen(TerminalScreen):
    """The running cell of a Jupyter kernel.

    A page can only clear a whole cell. So the output of the other ranks is kept here and shown again when one rank clears its own.
    """

    def __init__(self, places: Mapping[int, str] | None = None) -> None:
        super().__init__(places)
        self._shown: list[tuple[int | None, StreamName | None, str, dict[str, Any], dict[str, Any]]] = []
        self._to_clear: set[int | None] = set()

    def text(self, name: StreamName, text: str, rank: int | None = None) -> None:
        """Write to the cell."""
        self._clear_if_due(rank)
        self._shown.append((rank, name, text, {}, {}))
        super().text(name, text, rank)

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, rank: int | None = None
    ) -> None:
        """Publish the bundle below the rank's name."""
        self._clear_if_due(rank)
        item = (rank, None, display_id or "", data, metadata)
        if update:
            self._shown = [item if shown[1] is None and shown[2] == display_id else shown for shown in self._shown]
        else:
            self._shown.append(item)
        self._publish(data, metadata, display_id, update, rank)

    def clear(self, wait: bool, rank: int | None = None) -> None:
        """Clear a rank's output in the cell."""
        self._to_clear.add(rank)
        if not wait:
            self._clear_if_due(rank)

    def _clear_if_due(self, rank: int | None) -> None:
        from IPython.display import clear_output

        if rank not in self._to_clear:
            return
        self._to_clear.discard(rank)
        self._shown = [shown for shown in self._shown if rank is not None and shown[0] != rank]
        clear_output(wait=bool(self._shown))  # if there is something to show again, the page changes only once
        for owner, name, text, data, metadata in self._shown:
            if name is None:
                self._publish(data, metadata, text, False, owner)
            else:
                super().text(name, text, owner)

    @staticmethod
    def _publish(data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, rank: int | None) -> None:
        from IPython.display import publish_display_data

        if rank is not None and not update:
            publish_display_data(heading((rank,)))
        transient = {"display_id": display_id} if display_id else None
        publish_display_data(data, metadata, transient=transient, update=update)


def present_screen(places: Mapping[int, str] | None = None) -> Screen:
    """Return the notebook's cell if this process is a Jupyter kernel, else the terminal.

    Args:
        places: The machine of each rank, if there is more than one machine.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return NotebookScreen(places) if shell is not None and hasattr(shell, "kernel") else TerminalScreen(places)


def labelled(text: str, rank: int | None, places: Mapping[int, str] | None = None) -> str:
    """Put the rank in front of each line, and its machine if that is known."""
    if rank is None:
        return text
    owner = f"[rank {rank}, {places[rank]}]" if places and rank in places else f"[rank {rank}]"
    return "".join(f"{owner} {line}\n" for line in text.removesuffix("\n").split("\n"))


def heading(ranks: Sequence[int]) -> dict[str, Any]:
    """Return a mime bundle that names the ranks whose displays follow."""
    name = name_ranks(ranks)
    return {"text/plain": f"{name}:", "text/html": f"<b>{name}</b>"}

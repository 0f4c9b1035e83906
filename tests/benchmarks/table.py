"""Gathers figures of a benchmark run, prints them as one table and keeps them as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

OUT = Path(__file__).parents[2] / "build" / "bench"


@dataclass(frozen=True)
class Figure:
    """One measured figure beside its aim."""

    what: str
    value: str
    against: str
    aim: str


class Figures:
    """The figures of one run."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[Figure] = []

    def add(self, what: str, value: str, against: str = "", aim: str = "") -> None:
        """Add one figure, and print it at once in case the run is cut off later."""
        self.rows.append(Figure(what, value, against, aim))
        print(f"\n{what}: {value}" + (f" ({against})" if against else ""), flush=True)

    def finish(self) -> None:
        """Print the table and write it to build/bench."""
        import torch

        machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"
        table = Table(title=f"{self.title} ({machine})", title_justify="left")
        for column in ("figure", "measured", "against", "aim"):
            table.add_column(column)
        for row in self.rows:
            table.add_row(row.what, row.value, row.against, row.aim)
        Console(width=150).print(table)
        OUT.mkdir(parents=True, exist_ok=True)
        record = {"title": self.title, "machine": machine, "figures": [asdict(row) for row in self.rows]}
        (OUT / f"{self.title.split()[0].lower()}.json").write_text(json.dumps(record, indent=1))


def seconds(action: Callable[[], object], times: int = 1) -> float:
    """Median wall time of a call, in seconds."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def show_seconds(value: float) -> str:
    """A time for people."""
    return f"{value * 1000:.2f} ms" if value < 0.1 else f"{value:.2f} s"

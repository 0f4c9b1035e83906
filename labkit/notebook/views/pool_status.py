"""A table of all ranks of a pool: process, device, state, memory and current work of each."""

from __future__ import annotations

import contextlib
import html
import subprocess
from dataclasses import dataclass

import psutil

from labkit.base.machine import find_program
from labkit.controller.hang.diagnosis import Diagnosis, RankState
from labkit.controller.pool import WorkerPool
from labkit.notebook.drawing.style import rank_style, text_table

COLUMNS = ("rank", "machine", "process", "device", "state", "own memory", "runs", "for")
# A sign for each state, shown beside its name.
_SIGNS = {"idle": "○", "finished": "○", "working": "●", "native": "●", "waiting": "◐", "silent": "?", "failed": "✕", "dead": "✕"}
_NVIDIA_S = 5.0


@dataclass(frozen=True)
class RankStatus:
    """One rank at one moment.

    Attributes:
        rank: The rank.
        pid: Its process id.
        device: ``cpu``, or its GPU, as in ``cuda:1``. Ranks may share one.
        state: A state of `labkit.controller.hang.diagnosis.RankState`; ``idle`` between runs.
        memory_bytes: The memory that would be freed if only this process ended; None if it is dead or on another machine.
        gpu_bytes: Its memory on its GPU; None on the CPU and if the driver does not report it.
        runs: The line that it runs, with its collective or task if any; empty if it runs nothing.
        for_s: Seconds since the run began on this rank; None if it runs nothing.
        machine: The machine on which it runs; empty for this machine.
    """

    rank: int
    pid: int
    device: str
    state: str
    memory_bytes: int | None
    gpu_bytes: int | None = None
    runs: str = ""
    for_s: float | None = None
    machine: str = ""


def rank_statuses(pool: WorkerPool) -> list[RankStatus]:
    """Look at every rank once, without disturbing a run in progress. Any thread may call this.

    Args:
        pool: An open pool.

    Ranks: controller. Blocks for at most about 1 s, on GPUs 6 s.
    """
    states = {state.rank: state for state in (pool.look() or Diagnosis("idle", "")).states}
    on_gpu = _gpu_bytes() if pool.device == "cuda" else {}
    devices, places, dead, found = pool.devices, pool.places, pool.dead_ranks, []
    for rank, pid in sorted(pool.pids.items()):
        machine = places.get(rank, "")
        memory_bytes = None if machine else _own_memory(pid)
        state = states.get(rank)
        gone = rank in dead if machine else memory_bytes is None
        word = "dead" if gone else state.state if state else "idle"
        runs, for_s = _work(state) if state and word in ("working", "waiting", "native") else ("", None)
        on_device = None if machine else on_gpu.get(pid)
        found.append(RankStatus(rank, pid, devices[rank], word, memory_bytes, on_device, runs, for_s, machine))
    return found


def _work(state: RankState) -> tuple[str, float | None]:
    call = f": {state.call}" if state.state == "waiting" else ""
    if not call and state.report is not None and (task := state.report.task) is not None:
        share = f" {100 * task.done_bytes // task.total_bytes} %" if task.total_bytes else ""
        call = f": {task.title}{share}"
    return f"{state.place}{call}", state.report.busy_s if state.report else None


def _own_memory(pid: int) -> int | None:
    """Return a rank's memory without the part shared with the fork server, such as torch's libraries; None if it has ended."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        with contextlib.suppress(psutil.AccessDenied, AttributeError):
            return int(process.memory_full_info().uss)
        return int(process.memory_info().rss)
    except psutil.Error:
        return None


def _gpu_bytes() -> dict[int, int]:
    """Return GPU memory by process id, as the driver reports it; empty if it does not, as in many containers."""
    command = find_program("nvidia-smi")
    if command is None:
        return {}
    query = [command, "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=_NVIDIA_S, stdin=subprocess.DEVNULL, cwd="/"
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = (line.split(",") for line in listing.stdout.splitlines())
    return {int(row[0]): int(row[1]) * 2**20 for row in rows if len(row) == 2 and row[1].strip().isdigit()}


def status_text(pool: WorkerPool, statuses: list[RankStatus]) -> str:
    """Return the pool in one line and its ranks as a text table."""
    columns, rows = _table(statuses)
    return "\n".join([repr(pool), *text_table(columns, rows)])


def status_html(pool: WorkerPool, statuses: list[RankStatus]) -> str:
    """Return the same for a notebook: a table that needs no script and no style sheet."""
    style = "text-align:left;padding:2px 14px 2px 0;vertical-align:top"
    columns, rows = _table(statuses)
    head = "".join(f'<th scope="col" style="{style}">{name}</th>' for name in columns)
    body = "".join(_row(status.rank, row, style) for status, row in zip(statuses, rows, strict=True))
    return f"<div>{html.escape(repr(pool))}</div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _table(statuses: list[RankStatus]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return head and rows without empty columns: the columns about a run are shown only during a run."""
    rows = [_cells(status) for status in statuses]
    shown = [place for place in range(len(COLUMNS)) if any(row[place] for row in rows)]
    return tuple(COLUMNS[place] for place in shown), [tuple(row[place] for place in shown) for row in rows]


def _row(rank: int, row: tuple[str, ...], style: str) -> str:
    look = rank_style(rank)
    chip = f"background:{look.color};color:{look.text_color};padding:0 8px;border-radius:2px;font-weight:bold"
    first, *others = row
    cells = "".join(f'<td style="{style}">{html.escape(text)}</td>' for text in others)
    return f'<tr><th scope="row" style="{style}"><span style="{chip}">{first}</span></th>{cells}</tr>'


def _cells(status: RankStatus) -> tuple[str, ...]:
    memory = "" if status.memory_bytes is None else _size(status.memory_bytes)
    if status.gpu_bytes is not None:
        memory += f", GPU {_size(status.gpu_bytes)}"
    since = "" if status.for_s is None else f"{status.for_s:.0f} s"
    word = "in native code" if status.state == "native" else status.state
    state = f"{_SIGNS.get(status.state, '')} {word}".strip()
    return str(status.rank), status.machine, str(status.pid), status.device, state, memory, status.runs, since


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes < 10 * 2**30 else f"{size_bytes / 2**30:.1f} GiB"

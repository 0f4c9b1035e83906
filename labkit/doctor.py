"""Examination of this machine: what it can run, one fact per line, with advice for each problem."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from labkit.base import machine

DISTRIBUTION = "torch-labkit"
SHM = "/dev/shm"
GIB = 2**30

# Below these values, something in the notebooks is known to fail or to be very slow.
MIN_SHM_BYTES = GIB
MIN_MEMORY_BYTES = 3 * GIB
MIN_OPEN_FILES = 1024
GOOD_OPEN_FILES = 4096

KERNELS = (
    "over TCP, Jupyter's default, every user of this machine can read the code and the output of notebooks. Start "
    "JupyterLab with --KernelManager.transport=ipc, as `make lab` does."
)

Level = Literal["ok", "problem", "fatal"]


@dataclass(frozen=True)
class Finding:
    """One fact about this machine.

    Attributes:
        name: The thing examined.
        value: The result.
        problem: What is wrong with it; empty if nothing is.

        advice: What to do about the problem.
        fatal: Whether this problem keeps labkit from running at all.
    """

    name: str
    value: str
    problem: str = ""
    advice: str = ""
    fatal: bool = False

    @property
    def level(self) -> Level:
        """The verdict in one word."""
        if not self.problem:
            return "ok"
        return "fatal" if self.fatal else "problem"

    def as_dict(self) -> dict[str, str]:
        """Return the finding as plain JSON, with advice only if there is a problem."""
        advice = self.advice if self.problem else ""
        return {"name": self.name, "level": self.level, "value": self.value, "problem": self.problem, "advice": advice}


def examine() -> list[Finding]:
    """Examine everything that labkit needs or can use, and start a small pool to see whether it works.

    Imports torch. An examination that itself fails becomes a finding and does not stop the others. Blocks for about a minute at
    most.

    Returns:
        The findings, in the order in which they should be read.
    """
    looks: list[Callable[[], Iterator[Finding]]] = [
        _system, _packages, _torch, _gpus, _processor_and_memory, _shared_memory, _open_files, _kernel, _chromium, _trust, _pools,
    ]  # fmt: skip
    findings: list[Finding] = []
    for look in looks:
        try:
            findings.extend(look())
        except Exception as error:
            name = look.__name__.strip("_").replace("_", " ")
            findings.append(Finding(name, "could not be examined", f"{type(error).__name__}: {error}", "This is a bug in labkit."))
    return findings


def render(findings: list[Finding], console: Console | None = None) -> None:
    """Print the findings as a table, and the problems with their advice below it."""
    console = console or Console(highlight=False)
    styles = {"ok": "green", "problem": "yellow", "fatal": "bold red"}
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        table.add_row(f"[{styles[finding.level]}]{finding.level}[/]", finding.name, finding.value)
    console.print(table)
    for finding in findings:
        if finding.problem:
            console.print(f"\n[{styles[finding.level]}]{finding.name}[/]: ", end="")
            console.print(f"{finding.problem}\n  -> {finding.advice}", markup=False)
    fatal = sum(finding.fatal for finding in findings)
    problems = sum(finding.level == "problem" for finding in findings)
    verdict = "labkit cannot run here." if fatal else "labkit runs here."
    console.print(f"\n{verdict} {problems + fatal or 'No'} problem{'' if problems + fatal == 1 else 's'} found.")


def _system() -> Iterator[Finding]:
    yield Finding("system", f"{platform.system()} {platform.release()} on {platform.machine()}")
    found = f"{platform.python_version()} at {sys.executable}"
    try:
        metadata = importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        yield Finding("Python", found)
        yield Finding("labkit", "not installed", "its requirements cannot be checked", "pip install -e . in the folder of labkit")
        return
    wanted = Requirement(f"python{metadata['Requires-Python']}").specifier
    bad = "" if wanted.contains(platform.python_version()) else f"labkit needs Python {wanted}"
    yield Finding("Python", found, bad, "Make a new environment with a Python in this range.", fatal=bool(bad))
    yield Finding("labkit", metadata["Version"])


def _packages() -> Iterator[Finding]:
    """Compare the installed version of each of the package's own requirements, including the lab extra, with its range."""
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:
        return  # reported by _system()
    for requirement in requirements:
        core = requirement.marker is None
        if core or (requirement.marker and requirement.marker.evaluate({"extra": "lab"})):
            yield _package(requirement, core)


def _package(requirement: Requirement, core: bool) -> Finding:
    advice = f"pip install '{requirement.name}{requirement.specifier}'"
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(requirement.name, "not installed", f"labkit {'' if core else '[lab] '}needs it", advice, fatal=core)
    fits = requirement.specifier.contains(version, prereleases=True)
    return Finding(requirement.name, version, "" if fits else f"labkit is made for {requirement.specifier}", advice)


def _torch() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        yield Finding("torch's build", "does not import", f"{type(error).__name__}: {error}", "Install torch again.", fatal=True)
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield Finding("torch's build", f"{torch.__version__}, {build}")
    if not (dist.is_available() and dist.is_gloo_available()):
        yield Finding("gloo", "missing", "this torch has no gloo backend", "Install torch from PyPI.", fatal=True)
        return
    yield Finding("gloo", "available")
    if not torch.version.cuda:
        yield Finding("NCCL", "not in this build of torch")
    elif not dist.is_nccl_available():
        yield Finding("NCCL", "missing", "this torch has CUDA but no NCCL backend", "Install torch from PyPI.")
    else:
        yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def _gpus() -> Iterator[Finding]:
    import torch

    listed = machine.nvidia_gpus()
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    limit = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not listed and not usable:
        yield Finding("GPUs", "none; pools run on the CPU with gloo")
        return
    problem, advice = "", ""
    if listed and not torch.version.cuda:
        problem = f"the driver lists {len(listed)} GPUs, but this torch is a build without CUDA"
        advice = "pip uninstall torch, then install labkit again: its requirement brings the CUDA build."
    elif listed and not usable and limit is None:
        problem = f"the driver ({listed[0].driver}) lists {len(listed)} GPUs, but torch cannot use them"
        advice = f"Install a driver that supports CUDA {torch.version.cuda}, or a torch for an older CUDA."
    note = f", CUDA_VISIBLE_DEVICES={limit}" if limit is not None else ""
    use = "; a pool with more ranks shares them, over gloo through host memory" if usable else ""
    yield Finding("GPUs", f"{usable} usable by torch{note}{use}", problem, advice)
    for gpu in listed:
        memory = f"{gpu.memory_bytes / GIB:.0f} GiB, {gpu.free_bytes / GIB:.0f} GiB free" if gpu.memory_bytes else "shared memory"
        yield Finding(f"GPU {gpu.index}", f"{gpu.name}, {memory}")


def _processor_and_memory() -> Iterator[Finding]:
    yield Finding("cores", str(machine.usable_cores()))
    available = machine.available_memory_bytes()
    short = (
        f"a pool of 4 ranks with its kernel needs about {MIN_MEMORY_BYTES / GIB:.0f} GiB" if available < MIN_MEMORY_BYTES else ""
    )
    yield Finding("memory", f"{available / GIB:.1f} GiB available", short, "Close other programs, or use world_size = 2.")


def _shared_memory() -> Iterator[Finding]:
    if not os.path.isdir(SHM):
        return  # macOS has none and does not need one
    size = shutil.disk_usage(SHM).total
    small = (
        "NCCL and DataLoader workers pass data through it and die with a bus error when it is full" if size < MIN_SHM_BYTES else ""
    )
    yield Finding("shared memory", f"{size / GIB:.2f} GiB in {SHM}", small, "In Docker: docker run --shm-size=2g, or --ipc=host.")


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = (
        "every rank and every connection between ranks needs some"
        if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES
        else ""
    )
    advice = f"ulimit -n {GOOD_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, GOOD_OPEN_FILES)}"
    yield Finding("open files", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}", few, advice)


def _kernel() -> Iterator[Finding]:
    """Check whether the kernel that notebooks ask for runs in this environment."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    advice = f"{sys.executable} -m ipykernel install --sys-prefix"
    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        yield Finding("kernel python3", "not found", "notebooks ask for this kernel", advice)
        return
    # A bare name means the interpreter that starts the kernel: jupyter_client substitutes its path.
    program = sys.executable if spec.argv[0] in {"python", "python3"} else spec.argv[0]
    own = os.path.realpath(program) == os.path.realpath(sys.executable)
    elsewhere = "" if own else "notebooks would run in another environment, perhaps without labkit"
    yield Finding("kernel python3", program, elsewhere, advice)


def _chromium() -> Iterator[Finding]:
    path = machine.find_chromium()
    missing = "" if path else "handouts are made as HTML only, and browser tests are skipped"
    yield Finding("Chromium", path or "not found", missing, "Install chromium (Debian: apt-get install chromium) for PDF handouts.")


def _pools() -> Iterator[Finding]:
    """Start a pool on each available kind of device and let its ranks add up their rank numbers."""
    import torch

    yield _pool(2, "cpu")
    if torch.cuda.is_available():
        yield _pool(torch.cuda.device_count(), "cuda")
        yield _pool(2 * torch.cuda.device_count(), "cuda", "pool on shared GPUs")


def _pool(world_size: int, device: Literal["cpu", "cuda"], name: str = "") -> Finding:
    import labkit

    name = name or f"pool on {device}"
    started = time.monotonic()
    try:
        with labkit.WorkerPool(world_size, device=device) as pool:
            seconds = time.monotonic() - started
            total = pool.run(_sum_of_ranks, timeout_s=60).same()
    except Exception as error:
        return Finding(name, "does not work", str(error), "The message says where it stopped.", fatal=device == "cpu")
    expected = world_size * (world_size - 1) // 2
    wrong = "" if total == expected else f"the all-reduce of the ranks gave {total} instead of {expected}"
    advice = "Check the network interface that the ranks use (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
    return Finding(name, f"{world_size} ranks, started in {seconds:.1f} s", wrong, advice, fatal=bool(wrong) and device == "cpu")


def _trust() -> Iterator[Finding]:
    """State what labkit cannot examine: who can reach this machine."""
    from labkit.controller.machines.launch_text import TRUST

    yield Finding("trust between ranks", TRUST)
    yield Finding("kernels of JupyterLab", KERNELS)


def _sum_of_ranks() -> Any:
    import torch
    import torch.distributed as dist

    on = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    total = torch.tensor([dist.get_rank()], device=on)
    dist.all_reduce(total)
    return int(total)

"""The plan of a pool on this machine, made before anything is started."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from labkit.controller.start.launchers import fork_server
from labkit.controller.start.launchers.launcher import Launcher
from labkit.controller.start.launchers.spawn import SpawnLauncher
from labkit.errors import InvalidPoolError, PoolStateError
from labkit.wire.spec import gpu_of

DEVICES = ("auto", "cpu", "cuda")
LAUNCHERS = ("local", "agents")
DEFAULT_WORLD_SIZE = 2
# More processes than this on one machine are more often a typing error than intended.
MOST_WORKERS = 256
# Each rank takes memory of its GPU for itself alone, some hundred MiB. More ranks than this share one only where asked to.
MOST_ON_A_GPU = 8


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool that this machine can run.

    Attributes:
        world_size: Number of ranks.
        device: The device they compute on.
        num_gpus: The number of GPUs of the machine that has the fewest; 0 if they were not counted.
        num_nodes: The number of machines.
        reason: Why the ranks compute on the CPU, if labkit chose this.
    """

    world_size: int
    device: Literal["cpu", "cuda"]
    num_gpus: int
    num_nodes: int = 1
    reason: str = ""

    @property
    def shares_gpus(self) -> bool:
        """True if there are fewer GPUs than ranks, so that ranks share them."""
        return self.device == "cuda" and self.num_gpus * self.num_nodes < self.world_size

    def device_of(self, rank: int) -> str:
        """Return the device of a rank, ``cpu`` or ``cuda:1``."""
        if self.device == "cpu":
            return "cpu"
        return f"cuda:{gpu_of(rank % (self.world_size // self.num_nodes), self.num_gpus)}"

    def describe(self) -> str:
        """Describe the plan in one line: what the ranks compute on, what they communicate over, and why."""
        if self.shares_gpus:
            gpus = "one GPU" if self.num_gpus == 1 else f"{self.num_gpus} GPUs"
            backend = f"{gpus} shared, gloo through host memory (NCCL needs one for each rank): times are not those of several GPUs"
        elif self.device == "cuda":
            backend = "one GPU each, NCCL"
        else:
            backend = "CPU processes, gloo" + (f" ({self.reason})" if self.reason else "")
        where = f" on {self.num_nodes} machines" if self.num_nodes > 1 else ""
        return f"{self.world_size} rank{'s' if self.world_size != 1 else ''}{where}, {backend}"


def check_arguments(world_size: int | None, device: str, launcher: str = "local", num_nodes: int = 1) -> None:
    """Refuse arguments that no machine can run.

    Raises:
        PoolStateError: This process is a rank of a pool itself.
        InvalidPoolError: The world size or the number of machines is not a positive integer, the world size is too large, the ranks
            cannot be divided equally among the machines, or the device or the launcher is unknown.
    """
    _refuse_in_rank()
    if launcher not in LAUNCHERS:
        renamed = "labkit starts its agents itself now, without torchrun. " if launcher == "torchrun" else ""
        raise InvalidPoolError(f"unknown launcher {launcher!r}. {renamed}Write 'local' or 'agents'.")
    _check_count("num_nodes", "machines", num_nodes)
    if num_nodes > 1 and launcher != "agents":
        raise InvalidPoolError(f"num_nodes={num_nodes} plays machines on this one, which needs launcher='agents'.")
    _check_device(device)
    if world_size is None:
        if num_nodes > 1:
            raise InvalidPoolError(f"with num_nodes={num_nodes} say how many ranks: world_size={2 * num_nodes}, for example.")
        return
    _check_count("world_size", "ranks", world_size)
    if world_size > MOST_WORKERS:
        raise InvalidPoolError(f"world_size={world_size}: one machine runs at most {MOST_WORKERS} workers.")
    if world_size % num_nodes:
        raise InvalidPoolError(f"world_size={world_size} ranks cannot be shared out equally to num_nodes={num_nodes}.")


def check_attachment(
    num_nodes: int,
    workers_per_node: int,
    device: str,
    listen: str,
    host: str | None,
    linger_s: float | None,
) -> None:
    """Refuse arguments that no machines can run.

    Raises:
        PoolStateError: This process is a rank of a pool itself.
        InvalidPoolError: A number is not a positive integer, the device is unknown, or the address, host or time is invalid.
    """
    _refuse_in_rank()
    _check_device(device)
    _check_count("num_nodes", "machines", num_nodes)
    _check_count("workers_per_node", "ranks on each machine", workers_per_node)
    if not re.fullmatch(r"tcp://[^/]+:(\*|\d{1,5})", listen):
        raise InvalidPoolError(f"listen={listen!r} is no address. Write 'tcp://INTERFACE:PORT', for example 'tcp://0.0.0.0:29600'.")
    port = listen.rpartition(":")[2]
    if port.isdigit() and not 0 < int(port) < 65536:
        raise InvalidPoolError(f"listen={listen!r}: ports go from 1 to 65535, and * takes a free one.")
    if host is not None and not re.fullmatch(r"[^\s:/]+|\[[0-9a-fA-F:]+\]", host):
        raise InvalidPoolError(f"host={host!r} is no name of a machine. Write its name or address alone; the port is in listen.")
    number = isinstance(linger_s, int | float) and not isinstance(linger_s, bool) and math.isfinite(linger_s) and linger_s > 0
    if linger_s is not None and not number:
        raise InvalidPoolError(f"linger_s is how long ranks wait for a notebook, a positive number of seconds, not {linger_s!r}.")


def is_endpoint(text: str) -> bool:
    """Return whether a text is ``HOST:PORT``."""
    found = re.fullmatch(r"(?:[^\s:/]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", text)
    return found is not None and 0 < int(found[1]) < 65536


def attached_plan(num_nodes: int, workers_per_node: int, device: str, num_gpus: int) -> PoolPlan:
    """Choose the device of an attached pool. On several machines each rank has a GPU of its own, or all compute on the CPU.

    Args:
        num_nodes: The number of machines.
        workers_per_node: Ranks on each.
        device: The device the user asked for.
        num_gpus: The number of GPUs of the machine that has the fewest.

    Raises:
        InvalidPoolError: The user asked for ``cuda`` and a machine has too few GPUs.
    """
    if num_nodes == 1:
        return make_plan(workers_per_node, device, lambda: num_gpus)
    if device == "cuda" and num_gpus < workers_per_node:
        raise InvalidPoolError(
            f"device='cuda' with {workers_per_node} ranks on each machine needs as many GPUs there, and one machine shows "
            f"{num_gpus}. Use device='auto' or 'cpu', or a smaller workers_per_node."
        )
    if device != "cpu" and num_gpus >= workers_per_node:
        return PoolPlan(num_nodes * workers_per_node, "cuda", num_gpus, num_nodes)
    reason = "" if device == "cpu" else f"one machine shows {_gpus(num_gpus)}"
    return PoolPlan(num_nodes * workers_per_node, "cpu", num_gpus, num_nodes, reason)


def _refuse_in_rank() -> None:
    if "LABKIT_RANK" in os.environ:
        raise PoolStateError(
            f"this is rank {os.environ['LABKIT_RANK']} of a pool, and only the notebook makes pools: "
            "take WorkerPool out of the %%spmd cell."
        )


def _check_device(device: str) -> None:
    if device not in DEVICES:
        raise InvalidPoolError(f"unknown device {device!r}. Write 'auto', 'cpu' or 'cuda'.")


def _check_count(name: str, what: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise InvalidPoolError(f"{name} is the number of {what}, an integer, not {count!r}.")
    if count < 1:
        raise InvalidPoolError(f"{name} is the number of {what}, at least 1, not {count}.")


def launcher() -> Launcher:
    """Return this system's way to start workers. ``LABKIT_START=spawn`` asks for new processes instead of forks."""
    if fork_server.available() and os.environ.get("LABKIT_START", "fork") != "spawn":
        return fork_server.shared()
    return SpawnLauncher()


def make_plan(world_size: int | None, device: str, count_gpus: Callable[[], int]) -> PoolPlan:
    """Choose the device and the world size.

    Args:
        world_size: The number of ranks the user asked for; None means one rank per GPU, or two without a GPU.
        device: The device the user asked for.
        count_gpus: Counts the GPUs of the machine.

    Raises:
        InvalidPoolError: The user asked for ``cuda`` and there is no GPU.
    """
    num_gpus = count_gpus() if device != "cpu" else 0
    wanted = world_size or (num_gpus or DEFAULT_WORLD_SIZE)
    if device == "cuda" and num_gpus == 0:
        raise InvalidPoolError("device='cuda' needs a GPU; torch finds none on this machine. Use device='auto' or 'cpu'.")
    if device == "cpu":
        return PoolPlan(wanted, "cpu", num_gpus)
    if num_gpus == 0:
        return PoolPlan(wanted, "cpu", num_gpus, reason="torch finds no GPU")
    if device == "auto" and wanted > num_gpus * MOST_ON_A_GPU:
        reason = f"more than {MOST_ON_A_GPU} ranks for each of {_gpus(num_gpus)}; device='cuda' shares them all the same"
        return PoolPlan(wanted, "cpu", num_gpus, reason=reason)
    return PoolPlan(wanted, "cuda", num_gpus)


def _gpus(count: int) -> str:
    return "no GPU" if count == 0 else f"{count} GPU{'s' if count > 1 else ''}"

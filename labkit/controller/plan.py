"""What a pool will look like on this machine, decided before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from labkit.controller.launchers import fork_server
from labkit.controller.launchers.launcher import Launcher
from labkit.controller.launchers.spawn import SpawnLauncher
from labkit.errors import InvalidPoolError, PoolStateError

DEVICES = ("auto", "cpu", "cuda")
DEFAULT_WORLD_SIZE = 2
# More processes than this on one machine is a typing error more often than a wish.
MOST_WORKERS = 256


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool that this machine can run.

    Attributes:
        world_size: Number of ranks.
        device: What they compute on.
        num_gpus: GPUs that were found (0 where nobody looked).
    """

    world_size: int
    device: Literal["cpu", "cuda"]
    num_gpus: int

    def describe(self) -> str:
        """In words, for people."""
        backend = "one GPU each, NCCL" if self.device == "cuda" else "CPU processes, gloo"
        return f"{self.world_size} rank{'s' if self.world_size != 1 else ''}, {backend}"


def check_arguments(world_size: int | None, device: str) -> None:
    """Refuse what no machine can run.

    Raises:
        PoolStateError: This process is a rank of a pool itself.
        InvalidPoolError: The world size is not a positive integer, or the device is unknown.
    """
    if "LABKIT_RANK" in os.environ:
        raise PoolStateError(
            f"this is rank {os.environ['LABKIT_RANK']} of a pool, and only the notebook makes pools: "
            "take WorkerPool out of the %%spmd cell."
        )
    if device not in DEVICES:
        raise InvalidPoolError(f"unknown device {device!r}. Write 'auto', 'cpu' or 'cuda'.")
    if world_size is None:
        return
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise InvalidPoolError(f"world_size is the number of ranks, an integer, not {world_size!r}.")
    if world_size < 1:
        raise InvalidPoolError(f"world_size is the number of ranks, at least 1, not {world_size}.")
    if world_size > MOST_WORKERS:
        raise InvalidPoolError(f"world_size={world_size}: one machine runs at most {MOST_WORKERS} workers.")


def launcher() -> Launcher:
    """How workers are started on this system. ``LABKIT_START=spawn`` asks for fresh processes instead of forks."""
    if fork_server.available() and os.environ.get("LABKIT_START", "fork") != "spawn":
        return fork_server.shared()
    return SpawnLauncher()


def make_plan(world_size: int | None, device: str, starter: Launcher) -> PoolPlan:
    """Choose device and world size.

    Args:
        world_size: What the user asked for; None means one rank per GPU, or two on CPU.
        device: What the user asked for.
        starter: Counts the GPUs.

    Raises:
        InvalidPoolError: ``cuda`` was asked for and there are too few GPUs.
    """
    num_gpus = starter.count_gpus() if device != "cpu" else 0
    wanted = world_size or (num_gpus or DEFAULT_WORLD_SIZE)
    if device == "cuda" and num_gpus < wanted:
        found = "no GPU" if num_gpus == 0 else f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}"
        raise InvalidPoolError(
            f"device='cuda' with world_size={wanted} needs {wanted} GPUs, one per rank (NCCL refuses two ranks on one GPU); "
            f"this machine shows {found}. Use device='auto' or 'cpu', or a smaller world_size."
        )
    if device == "cuda" or (device == "auto" and num_gpus >= wanted and num_gpus > 0):
        return PoolPlan(wanted, "cuda", num_gpus)
    return PoolPlan(wanted, "cpu", num_gpus)

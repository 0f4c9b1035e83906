"""The data that a worker process gets when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from labkit.wire.messages import GroupSpec
from labkit.wire.transport import Endpoint


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker's place in the pool, and everything it needs to start.

    Attributes:
        rank: Its global rank.
        local_rank: Its rank on this machine.
        local_world_size: Ranks on this machine.
        device: ``cpu`` or ``cuda``.
        endpoint: The controller's address and the client key.
        group: How to form the first process group.
        directory: A folder that the pool's ranks on this machine share; other users cannot enter it.
        environ: The kernel's environment, copied completely.
        cwd: Working directory.
        sys_path: The kernel's import path.
        joining: Whether it replaces a rank of a running pool, whose other ranks form new groups at the same moment.
        num_gpus: GPUs for the ranks on this machine; if they are fewer than the ranks, the ranks share them.
    """

    rank: int
    local_rank: int
    local_world_size: int
    device: Literal["cpu", "cuda"]
    endpoint: Endpoint
    group: GroupSpec
    directory: str
    environ: dict[str, str] = field(default_factory=dict)
    cwd: str = "."
    sys_path: tuple[str, ...] = ()
    joining: bool = False
    num_gpus: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks in the pool."""
        return self.group.world_size

    @property
    def gpu(self) -> int:
        """The index of its GPU, if it computes on one."""
        return gpu_of(self.local_rank, self.num_gpus)

    @property
    def shares_gpu(self) -> bool:
        """True if other ranks compute on its GPU."""
        return self.device == "cuda" and self.local_world_size > self.num_gpus


def gpu_of(local_rank: int, num_gpus: int) -> int:
    """Return the index of a rank's GPU. Ranks that are more than the GPUs share them round robin."""
    return local_rank % num_gpus if num_gpus else local_rank

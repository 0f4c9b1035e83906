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
        local_rank: Its rank on this machine; the index of its GPU.
        local_world_size: Ranks on this machine.
        device: ``cpu`` or ``cuda``.
        endpoint: The controller's address and the client key.
        group: How to form the first process group.
        directory: A folder that the pool's ranks on this machine share; other users cannot enter it.
        environ: The kernel's environment, copied completely.
        cwd: Working directory.
        sys_path: The kernel's import path.
        joining: Whether it replaces a rank of a running pool, whose other ranks form new groups at the same moment.
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

    @property
    def world_size(self) -> int:
        """Number of ranks in the pool."""
        return self.group.world_size

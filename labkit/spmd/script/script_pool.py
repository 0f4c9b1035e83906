"""The pool of a script: the counterpart of ``labkit.WorkerPool`` over the ranks of torchrun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from labkit.base.ranks import RankResults, RankSpec


class ScriptJob(Protocol):
    """The ranks of the script; see `labkit.spmd.script.torchrun.Job`."""

    namespace: dict[str, Any]
    world_size: int
    device: torch.device

    def ask(self, function: Callable[..., Any], *args: Any, ranks: RankSpec = None, **kwargs: Any) -> RankResults[Any]:
        """Call a function with the job on ranks."""

    def forget(self) -> None:
        """Forget the variables that cells have made."""

    def renew(self, world_size: int) -> None:
        """Let the first ranks start anew."""


class ScriptPool:
    """The pool that the notebook's own process sees, over the ranks of the script. Ranks: rank 0, inside a cell of that process."""

    def __init__(self, job: ScriptJob) -> None:
        self._job = job

    def __repr__(self) -> str:
        return f"ScriptPool(world_size={self.world_size}, device={self.device!r})"

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._job.world_size

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self._job.device.type

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: RankSpec = None, timeout_s: float | None = None, **kwargs: Any
    ) -> RankResults[Any]:
        """Behave like ``WorkerPool.run``, but without its timeout: nothing watches a script. Blocks while the function runs."""
        return self._job.ask(_run, function, *args, ranks=ranks, **kwargs)

    def push(self, ranks: RankSpec = None, **values: Any) -> None:
        """Behave like ``WorkerPool.push``."""
        self._job.ask(_push, values, ranks=ranks)

    def pull(self, expression: str, ranks: RankSpec = None) -> RankResults[Any]:
        """Behave like ``WorkerPool.pull``."""
        return self._job.ask(_pull, expression, ranks=ranks)

    def restart(self, ranks: RankSpec = None) -> None:
        """Behave like ``WorkerPool.restart``: these ranks, or all, forget the variables of cells, but keep their processes."""
        if ranks is None:
            self._job.ask(renew, self.world_size)
        else:
            self._job.ask(_forget, ranks=ranks)

    def close(self) -> None:
        """Do nothing: the ranks end with the script."""


def _run(job: ScriptJob, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # A function from the notebook can also use names that exist only in the rank's namespace.
    own = getattr(function, "__globals__", None)
    if own is not None and getattr(function, "__module__", None) == "__main__" and own is not job.namespace:
        for name, value in job.namespace.items():
            own.setdefault(name, value)
    return function(*args, **kwargs)


def _push(job: ScriptJob, values: dict[str, Any]) -> None:
    job.namespace.update(values)


def _pull(job: ScriptJob, expression: str) -> Any:
    return eval(expression, job.namespace)


def _forget(job: ScriptJob) -> None:
    job.forget()


def renew(job: ScriptJob, world_size: int) -> None:
    """Restart with the first ranks. Ranks: collective, see `labkit.spmd.script.torchrun.Job.renew`."""
    job.renew(world_size)

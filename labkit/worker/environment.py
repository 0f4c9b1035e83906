"""What a worker takes over from its controller, and what torchrun would have set."""

from __future__ import annotations

import os
import sys

from labkit.wire.spec import WorkerSpec

INLINE_FIGURES = "module://matplotlib_inline.backend_inline"


def enter(spec: WorkerSpec) -> None:
    """Take over the controller's environment, folder and import path, and set what torchrun sets."""
    os.environ.clear()
    os.environ.update(spec.environ)
    os.environ.update(
        RANK=str(spec.rank),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_RANK=str(spec.local_rank),
        LOCAL_WORLD_SIZE=str(spec.local_world_size),
        LABKIT_RANK=str(spec.rank),
    )
    os.chdir(spec.cwd)
    sys.path[:] = spec.sys_path
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # Matplotlib reads this variable when it is imported, and the fork server may have imported it under another environment.
    matplotlib = sys.modules.get("matplotlib")
    if matplotlib is not None:
        matplotlib.rcParams["backend"] = os.environ["MPLBACKEND"]

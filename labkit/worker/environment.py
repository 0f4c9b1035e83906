"""What a worker takes over from its controller, and what torchrun would have set."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time

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
    # So do these: where temporary files go, the time zone, and torch with TORCH_DISTRIBUTED_DEBUG.
    tempfile.tempdir = None
    if hasattr(time, "tzset"):
        time.tzset()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None:
        distributed.set_debug_level_from_env()


def draw_anew() -> None:
    """Draw new random states, as each process draws its own under torchrun; a forked one has those of the fork server.

    Python's ``random`` does it by itself at each fork. ``secrets``, ``uuid``, OpenSSL and names of temporary files need none of
    this. The secret behind ``hash(str)`` cannot be drawn again in a process that runs.
    """
    import numpy as np
    import torch

    np.random.seed()
    # Not torch.seed(): it would have the ranks' CUDA generators start from this number, and they draw their own.
    torch.random.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)

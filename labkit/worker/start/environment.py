"""The environment of a worker: taken over from its controller, with the variables that torchrun would set."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time

from labkit.wire.spec import WorkerSpec

INLINE_FIGURES = "module://matplotlib_inline.backend_inline"


def enter(spec: WorkerSpec) -> None:
    """Take over the controller's environment, folder and import path, and set the variables that torchrun sets."""
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
    # The following are also read only once: the temporary folder, the time zone, and TORCH_DISTRIBUTED_DEBUG in torch.
    tempfile.tempdir = None
    if hasattr(time, "tzset"):
        time.tzset()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None:
        distributed.set_debug_level_from_env()


def draw_anew() -> None:
    """Draw new random states, as each process does under torchrun. A forked process has those of the fork server.

    Python's ``random`` is reseeded automatically at each fork. ``secrets``, ``uuid``, OpenSSL and names of temporary files do not
    need this. The secret behind ``hash(str)`` cannot be changed in a running process.
    """
    import numpy as np
    import torch

    np.random.seed()
    # Not torch.seed(): it would start the ranks' CUDA generators from this number, and they draw their own.
    torch.random.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)

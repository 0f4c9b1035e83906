"""The modules that a worker is made of. They are imported before the folder that its user stands in is on the import path.

In a folder that others can write to somebody's ``jedi.py`` could lie, which a cell as small as ``x = 1`` would then run.
"""

from __future__ import annotations

import contextlib
import importlib
import os

from labkit.base import torch_caches

# Forking waits for them.
FIRST_IMPORTS = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",  # an optimizer's first step imports it, on every rank
    "labkit.worker.run.loop",
    # A worker's shell imports these when it is made; they take a quarter of its start.
    "IPython.core.completer",
    "IPython.core.completerlib",
    "IPython.core.crashhandler",
    "IPython.core.magics",
)
# IPython imports these late, for `!command` and completion, and can be without.
LATE_IMPORTS = ("pexpect", "jedi")


def import_machinery() -> None:
    """Import what every worker needs, with torch's caches in a private folder."""
    _keep_headers_in_the_cache()
    for name in FIRST_IMPORTS:
        importlib.import_module(name)
    for name in LATE_IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _keep_headers_in_the_cache() -> None:
    """Let torch use its cache's folder for precompiled headers too, for which it does not ask the variable.

    Nothing may have been compiled yet: ``torch._inductor.codecache`` asks for the folder once, when it is imported.
    """
    from torch._inductor.runtime import cache_dir_utils, runtime_utils

    for module in (cache_dir_utils, runtime_utils):
        vars(module)["default_cache_dir"] = lambda: os.environ.get(torch_caches.VARIABLE) or torch_caches.folder(os.environ)

"""PyTorch's own distributed test bodies: how a rank runs one, and which verdict follows from what the ranks noted.

The bodies ship inside the installed torch, in ``torch.testing._internal.distributed.distributed_test``, so they match its version
exactly. A body gets the same environment as from torch's own runner, except that the caller of :func:`run_body` provides the
default process group: labkit on a pool, torch in plain processes (:mod:`tests.process.upstream_plain`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

WORLD_SIZE = 4
# Seconds for one body. The slowest took 6 on two cores that others used too.
LIMIT_S = 90.0
# What a body that passes may leave behind.
OUT_OF_STEP = "the next collective of the default group fails"
MODULE = "torch.testing._internal.distributed.distributed_test"

Ranks = Callable[[str, Path], "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a body.

    Attributes:
        kind: ``passes``, ``fails``, ``skips``, ``hangs``, ``dies``, or ``reported``: it passes, and labkit raises an error at the
            end of the run for what the body has left open. In the list also ``varies``: it passes, or fails as is said.
        says: The first error or the reason; :data:`OUT_OF_STEP` or nothing for a body that passes.
    """

    kind: str
    says: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.says}" if self.says else self.kind

    def fits(self, expected: Verdict) -> bool:
        """Return whether this was expected. An error has to contain what it was expected to say."""
        if self == expected or (expected.kind == "varies" and self == Verdict("passes")):
            return True
        kind = "fails" if expected.kind == "varies" else expected.kind
        return self.kind == kind != "passes" and expected.says in self.says


# ---- on a rank -------------------------------------------------------------------------------------------------------


def upstream() -> ModuleType:
    """Import torch's module on a rank so that no decorator skips a body: skips speak of torch's own machines, not of this one."""
    with pytest.MonkeyPatch.context() as patch:
        # Read while the module is imported. run_body sets the real path.
        patch.setenv("BACKEND", "gloo")
        patch.setenv("INIT_METHOD", "file:///set/for/each/body")
        if MODULE not in sys.modules:
            from torch.testing._internal import common_distributed, common_utils

            for name in ("skip_if_no_gpu", "skip_if_odd_worldsize", "skip_if_rocm_multiprocess", "skip_if_small_worldsize"):
                patch.setattr(common_distributed, name, _as_it_is)
            for name in ("nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend", "requires_nccl_version", "skip_if_lt_x_gpu"):
                patch.setattr(common_distributed, name, _takes_any)
            for owner, name in (
                (common_utils, "skip_but_pass_in_sandcastle"),
                (common_utils, "skip_but_pass_in_sandcastle_if"),
                (unittest, "skip"),
                (unittest, "skipIf"),
                (unittest, "skipUnless"),
            ):
                patch.setattr(owner, name, _takes_any)
        return importlib.import_module(MODULE)


def _as_it_is(body: Any) -> Any:
    return body


def _takes_any(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return _as_it_is


def names() -> list[str]:
    """Return the names of all bodies, on a rank."""
    return [name for name in dir(upstream().DistributedTest._DistTestBase) if name.startswith("test_")]


def run_body(name: str, folder: str) -> None:
    """Run one body on this rank as torch's runner does, and note in the folder what became of it.

    Raises:
        BaseException: What the body raised, unless it asked to be skipped.
    """
    import torch.distributed as dist
    from torch.testing._internal import common_utils

    module, rank = upstream(), int(os.environ["RANK"])
    shared = f"file://{folder}/init_dir/shared_init_file"
    kept = os.environ.copy()
    try:
        os.environ.update(BACKEND="gloo", TEMP_DIR=folder, INIT_METHOD=shared)
        module.INIT_METHOD = shared
        module.Barrier.barrier_id = 0
        common_utils.set_rng_seed()
        case = type("Body", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})(name)
        case.rank, case.file_name = rank, f"{folder}/file_name"
        with _noted(Path(folder, f"outcome_{rank}")):
            getattr(case, name)()
    finally:
        os.environ.clear()
        os.environ.update(kept)
        dist.set_debug_level_from_env()


def next_collective() -> tuple[bool, int]:
    """Return whether a collective of the default group gives the right sum on this rank, and torch's counter of groups."""
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones) == WORLD_SIZE, dist.distributed_c10d._world.group_count


@contextlib.contextmanager
def _noted(path: Path) -> Iterator[None]:
    """Write down how and when the block ended; let errors through, so that the caller frees ranks that wait."""
    try:
        yield
        _note(path, Verdict("passes"))
    except unittest.SkipTest as skip:
        _note(path, Verdict("skips", str(skip)))
    except SystemExit as end:
        says = _skip_of_exit(end.code)
        _note(path, Verdict("skips", says) if says else Verdict("fails", f"SystemExit: {end.code}"))
        if not says:
            raise
    except BaseException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        _note(path, Verdict("fails", f"{type(error).__name__}: {lines[0].strip() if lines else ''}"))
        raise


def _skip_of_exit(code: Any) -> str:
    """Return the reason why torch's decorators end a process with this code; empty for any other code."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return next((skip.message for skip in TEST_SKIPS.values() if skip.exit_code == code), "")


def _note(path: Path, verdict: Verdict) -> None:
    path.with_suffix(".partial").write_text(json.dumps([time.monotonic(), verdict.kind, verdict.says]))
    path.with_suffix(".partial").rename(path)


# ---- beside the ranks ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def body_folder() -> Iterator[Path]:
    """Make the folders that torch's runner makes for each body."""
    with tempfile.TemporaryDirectory(prefix="body-") as made:
        for name in ("barrier", "test_dir", "init_dir"):
            Path(made, name).mkdir()
        yield Path(made)


def judge(folder: Path) -> Verdict:
    """Return the verdict on a body from what its ranks noted: the first error in time, else a skip, else that it passes."""
    noted = sorted(json.loads(path.read_text()) for path in folder.glob("outcome_?"))
    verdicts = [Verdict(kind, says) for _, kind, says in noted]
    for kind in ("fails", "skips"):
        for verdict in verdicts:
            if verdict.kind == kind:
                return verdict
    if len(verdicts) < WORLD_SIZE:
        return Verdict("dies", f"only {len(verdicts)} of {WORLD_SIZE} ranks came to an end")
    return Verdict("passes")


def verdicts(run: Ranks, chosen: Iterable[str]) -> dict[str, Verdict]:
    """Run these bodies one after the other and return the verdict on each."""
    found = {}
    for name in chosen:
        with body_folder() as folder:
            found[name] = run(name, folder)
    return found

"""PyTorch's own test bodies in plain processes, without labkit: the control for the same bodies on a pool.

``python -m tests.process.upstream_plain [BODY...]`` runs all bodies or some, and prints what did not pass as groups for
``upstream_verdicts.toml``. Each body gets four fresh processes from ``torch.multiprocessing``. They are forked from a server that
has imported torch and has run no operator; ``--spawn`` starts each from nothing, which takes several seconds a body.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from tests.process.upstream import LIMIT_S, OUT_OF_STEP, WORLD_SIZE, Verdict, judge, names, run_body, upstream, verdicts

GROUP_TIMEOUT = timedelta(seconds=60)  # as torch's runner has it
NEXT_TIMEOUT = timedelta(seconds=10)


def plain_rank(rank: int, name: str, folder: str) -> None:
    """Be one of the processes of a body: join the default group, run the body, leave when all others have run it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.stdout = sys.stderr
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/default_group", world_size=WORLD_SIZE, rank=rank, timeout=GROUP_TIMEOUT
    )
    run_body(name, folder)
    # Others may still need this process: they read from its sockets, or wait for it in torch's file barrier.
    _await_all(folder, "outcome")
    _note_next_collective(rank, folder)
    _await_all(folder, "next")
    os._exit(0)


def _await_all(folder: str, what: str) -> None:
    while len(list(Path(folder).glob(f"{what}_?"))) < WORLD_SIZE:
        time.sleep(0.01)


def _note_next_collective(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    try:
        dist.all_reduce(ones, async_op=True).wait(NEXT_TIMEOUT)
    except RuntimeError:
        pass  # the sum is not right then
    Path(folder, f"next_{rank}").write_text(str(float(ones)))


def in_plain_processes(name: str, folder: Path, start_method: str = "forkserver") -> Verdict:
    """Run one body on fresh processes; kill those that an error of another leaves waiting."""
    import torch.multiprocessing

    ranks = torch.multiprocessing.start_processes(
        plain_rank, (name, str(folder)), WORLD_SIZE, join=False, start_method=start_method
    )
    deadline = time.monotonic() + LIMIT_S
    try:
        while not ranks.join(timeout=1, grace_period=3):
            if time.monotonic() > deadline:
                return Verdict("hangs", f"no end within {LIMIT_S:g} s")
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException):
        pass  # the ranks have noted what went wrong
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
    verdict = judge(folder)
    if verdict == Verdict("passes") and {path.read_text() for path in folder.glob("next_?")} != {str(float(WORLD_SIZE))}:
        return Verdict("passes", OUT_OF_STEP)
    return verdict


def grouped(found: dict[str, Verdict]) -> str:
    """Return the bodies that did not pass as groups of ``upstream_verdicts.toml``, in which the reasons are still to be written."""
    groups: dict[Verdict, list[str]] = {}
    for name, verdict in sorted(found.items()):
        if verdict != Verdict("passes"):
            groups.setdefault(verdict, []).append(name)
    return "\n".join(
        f"[[exceptions]]\nreason = ''\nverdict = {json.dumps(verdict.kind)}\nsays = {json.dumps(verdict.says)}\n"
        + "".join(["bodies = [\n", *(f'    "{name}",\n' for name in bodies), "]\n"])
        for verdict, bodies in groups.items()
    )


def main() -> None:
    """Run the bodies and print the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bodies", nargs="*", help="their names; all when none is given")
    parser.add_argument("--spawn", action="store_true", help="start each process from nothing")
    parser.add_argument("--json", action="store_true", help="print the verdict on every body as JSON instead of groups")
    options = parser.parse_args()
    os.environ.update(WORLD_SIZE=str(WORLD_SIZE), BACKEND="gloo", INIT_METHOD="file:///set/for/each/body")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.set_forkserver_preload(["tests.process.upstream_preload"])
    start_method = "spawn" if options.spawn else "forkserver"

    def run(name: str, folder: Path) -> Verdict:
        began = time.monotonic()
        verdict = in_plain_processes(name, folder, start_method)
        print(f"{time.monotonic() - began:6.1f} s  {name}: {verdict}", file=sys.stderr, flush=True)
        return verdict

    upstream()
    found = verdicts(run, options.bodies or names())
    print(json.dumps({name: [verdict.kind, verdict.says] for name, verdict in found.items()}) if options.json else grouped(found))


if __name__ == "__main__":
    main()

"""``python -P -m labkit.worker --connect tcp://HOST:PORT --key-file FILE``: the agent of one machine."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from pathlib import Path

from labkit.errors import LabkitError
from labkit.wire.key_file import KeyFile
from labkit.worker.groups.addresses import SCHEDULER_VARIABLES, node_claim
from labkit.worker.machine.agent import Agent


def main() -> int:
    """Serve a notebook until it closes its pool. Return the exit code, which is 0 only then."""
    parser = argparse.ArgumentParser(prog="python -P -m labkit.worker", description=__doc__)
    parser.add_argument("--connect", required=True, metavar="tcp://HOST:PORT", help="the notebook, as WorkerPool.attach() shows it")
    parser.add_argument("--key-file", required=True, type=Path, help="copied from the notebook's machine, mode 0600")
    parser.add_argument(
        "--node-rank",
        type=_rank,
        metavar="N",
        help=f"which machine this is, from 0; without it {' or '.join(SCHEDULER_VARIABLES)} says so, or the order of arrival",
    )
    parser.add_argument("--linger", type=_seconds, default=3.0, metavar="SECONDS", help="how long ranks wait for a silent notebook")
    parser.add_argument(
        "--wait", type=_seconds, default=600.0, metavar="SECONDS", help="how long to wait for the notebook at first"
    )
    parser.add_argument("--remove", metavar="FOLDER", help=argparse.SUPPRESS)  # at the end: its owner may be gone
    args = parser.parse_args()
    try:
        keys = KeyFile.read(args.key_file).keys()
        claim = node_claim(args.node_rank, os.environ)
        reason = Agent(args.connect, keys, claim, args.linger, args.wait).run()
    except LabkitError as error:
        reason = str(error)
    if args.remove:
        shutil.rmtree(args.remove, ignore_errors=True)
    if reason:
        sys.stderr.write(f"labkit: {reason}\n")
    return 1 if reason else 0


def _rank(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError  # argparse says which option it is
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError  # argparse says which option it is
    return value


if __name__ == "__main__":
    sys.exit(main())

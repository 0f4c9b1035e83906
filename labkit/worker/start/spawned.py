"""A worker in its own process, started without the fork server: ``python -m labkit.worker.start.spawned --spec-fd N``."""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import threading

from labkit.wire.pipes import Kept
from labkit.wire.spec import WorkerSpec
from labkit.worker.start.environment import enter
from labkit.worker.start.imports import import_machinery


def watch_lifeline(fd: int) -> None:
    """End this process and all processes it has started when the controller's end of the pipe closes."""

    def wait() -> None:
        os.read(fd, 1)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, name="labkit-lifeline", daemon=True).start()


def main() -> None:
    """Read the spec, start the worker and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec-fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--read-fds", type=int, nargs=2, required=True)
    parser.add_argument("--kept-fd", type=int, required=True)
    args = parser.parse_args()
    watch_lifeline(args.lifeline_fd)
    with os.fdopen(args.spec_fd, "rb") as file:
        spec: WorkerSpec = pickle.load(file)
    import_machinery()
    enter(spec)
    from labkit.worker.run.loop import main as serve

    kept = Kept(args.kept_fd)
    os.close(args.kept_fd)
    serve(spec, tuple(args.read_fds), kept)
    # As in the fork server: the interpreter's own shutdown takes up to 2 s with torch in it, and nothing needs it.
    os._exit(0)


if __name__ == "__main__":
    main()

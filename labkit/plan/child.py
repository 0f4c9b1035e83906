"""The process that makes one plan: ``python -m labkit.plan.child`` reads a job from stdin and writes the answer to stdout."""

from __future__ import annotations

import os
import pickle
import sys
import threading

from labkit.plan.records import JobError


def main() -> None:
    """Process one job and write a pickled `Plan`, or the text of a `JobError`."""
    # The user's functions may print, so keep their output out of the answer.
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        # Functions pickled by name are imported with the parent's path. Import torch first, with this process's own path, because
        # the parent's may begin with the working directory.
        path = pickle.load(sys.stdin.buffer)
        from labkit.plan.compute import compute_plan

        sys.path[:] = path
        job = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        try:
            found: object = compute_plan(job)
        except JobError as error:
            found = str(error)
        pickle.dump(found, answer)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()

"""What has to be settled in a process of the tests before it imports anything else, and is inherited by those that it starts."""

from __future__ import annotations

import os
import sys

from labkit.course.light_nbformat import import_nbformat

# Before anything imports torch: several ranks on few cores, each with a thread pool of its own, only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without compiled files a thousand processes would compile labkit anew, and pytest its own form of the tests in each of its own.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
import_nbformat()

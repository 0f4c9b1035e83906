"""Settings that a process of the tests needs before it imports anything else; processes that it starts inherit them."""

from __future__ import annotations

import os
import sys

from labkit.course.light_nbformat import import_nbformat

# Before anything imports torch: several ranks on few cores, each with its own thread pool, would slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without compiled files a thousand processes would compile labkit again, and each of pytest's processes its own form of the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
import_nbformat()

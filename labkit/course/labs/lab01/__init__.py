"""The checks of the exercises in notebook 01. Each measures what the learner's code does."""

from __future__ import annotations

from labkit.course.labs.lab01.app_state import check_app_state
from labkit.course.labs.lab01.chunk_rows import ChunkRows, check_chunk_rows
from labkit.course.labs.lab01.manifest import check_manifest

__all__ = ["ChunkRows", "check_app_state", "check_chunk_rows", "check_manifest"]

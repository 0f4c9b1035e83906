"""The checks of the exercises in notebook 03. Each measures what the learner's code does."""

from __future__ import annotations

from labkit.course.labs.lab03.by_name import check_by_name
from labkit.course.labs.lab03.canonical import check_canonical
from labkit.course.labs.lab03.differences import check_differences
from labkit.course.labs.lab03.shard_like import check_shard_like

__all__ = ["check_by_name", "check_canonical", "check_differences", "check_shard_like"]

"""Checks of the exercises in notebook 07. Each measures what the learner's code does."""

from __future__ import annotations

from labkit.course.lab07.between import check_between_bytes
from labkit.course.lab07.by_node import check_all_reduce_by_node
from labkit.course.lab07.lost import check_lost_names

__all__ = ["check_all_reduce_by_node", "check_between_bytes", "check_lost_names"]

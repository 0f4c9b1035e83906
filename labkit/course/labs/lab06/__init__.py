"""Notebook 06: five checkpoints, each with one fault, and checks of the learner's findings."""

from __future__ import annotations

from labkit.course.labs.lab06.answers import check_lost_state, check_not_finite, check_repair, check_short_file, check_stale_file
from labkit.course.labs.lab06.cases import Cases, plant

__all__ = [
    "Cases",
    "check_lost_state",
    "check_not_finite",
    "check_repair",
    "check_short_file",
    "check_stale_file",
    "plant",
]

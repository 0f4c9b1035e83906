"""Learners' own copies of the labs: writing them, finding the solved exercises, and the start page."""

from __future__ import annotations

from labkit.course.learner.solved import progress

__all__ = ["progress"]

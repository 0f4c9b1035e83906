"""The learner's own copies of the labs: where they are written, which exercises are solved, the page that leads to them."""

from __future__ import annotations

from labkit.course.learner.solved import progress

__all__ = ["progress"]

"""The checks of the exercises in notebook 02. Each compares with what autograd really saves, moves or recomputes."""

from __future__ import annotations

from labkit.course.labs.lab02.choosing import check_choose
from labkit.course.labs.lab02.hooks import check_hooks
from labkit.course.labs.lab02.kept_bytes import check_kept_bytes
from labkit.course.labs.lab02.outcome import check_outcome

__all__ = ["check_choose", "check_hooks", "check_kept_bytes", "check_outcome"]

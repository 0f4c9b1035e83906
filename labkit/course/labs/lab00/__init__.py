"""The checks of the exercises in notebook 00. Each measures on the ranks what the learner's code does there."""

from __future__ import annotations

from labkit.course.labs.lab00.log_mean import check_log_mean
from labkit.course.labs.lab00.mean_loss import check_mean_loss
from labkit.course.labs.lab00.my_all_reduce import check_my_all_reduce

__all__ = ["check_log_mean", "check_mean_loss", "check_my_all_reduce"]

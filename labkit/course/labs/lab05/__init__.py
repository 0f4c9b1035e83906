"""The checks of the exercises in notebook 05. Each measures what the learner's code does."""

from __future__ import annotations

from labkit.course.labs.lab05.grad_norm import check_grad_norm
from labkit.course.labs.lab05.grad_norm_model import norm_model
from labkit.course.labs.lab05.owner import check_owner
from labkit.course.labs.lab05.plan import check_plan_linter, plan_case
from labkit.course.labs.lab05.rebuild import check_rebuild, save_tensors

__all__ = ["check_grad_norm", "check_owner", "check_plan_linter", "check_rebuild", "norm_model", "plan_case", "save_tensors"]

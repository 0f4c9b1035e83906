"""What a training job takes on every rank, before there are ranks: memory, traffic, checkpoint.

The numbers come from torch's own FSDP2, tensor parallelism and checkpoint planner, which run in a child process on a fake
process group and on tensors without data. Importing this package imports no torch.
"""

from __future__ import annotations

from labkit.plan.process import make_plan
from labkit.plan.records import CheckpointPlan, JobError, Plan, RankPlan, Traffic, TrainingJob

__all__ = ["CheckpointPlan", "JobError", "Plan", "RankPlan", "Traffic", "TrainingJob", "make_plan"]

"""Plans of a training job before any rank runs: memory, traffic and checkpoint on every rank.

The numbers come from torch's own FSDP2, tensor parallelism and checkpoint planner. These run in a child process, on a fake
process group and on tensors without data. Importing this package does not import torch.
"""

from __future__ import annotations

from labkit.plan.process import make_plan
from labkit.plan.records import CheckpointPlan, JobError, Plan, RankPlan, Traffic, TrainingJob

__all__ = ["CheckpointPlan", "JobError", "Plan", "RankPlan", "Traffic", "TrainingJob", "make_plan"]

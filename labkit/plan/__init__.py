"""Plans of a training job, made before any rank runs: memory, traffic and checkpoint on every rank.

The numbers come from torch's own FSDP2, tensor parallelism and checkpoint planner, which run in a child process, on a fake process
group and on tensors without data. Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.base.lazy import lazy_names

if TYPE_CHECKING:
    from labkit.plan.process import make_plan
    from labkit.plan.records import CheckpointPlan, JobError, Plan, RankPlan, Traffic, TrainingJob
    from labkit.plan.traffic import traffic_of

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "process": "make_plan",
        "records": "CheckpointPlan JobError Plan RankPlan Traffic TrainingJob",
        "traffic": "traffic_of",
    },
)

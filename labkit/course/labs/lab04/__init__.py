"""The checks of the exercises in notebook 04. Each compares the answer with what the runtime really does."""

from __future__ import annotations

from labkit.course.labs.lab04.collectives import check_collectives
from labkit.course.labs.lab04.event_order import check_event_order
from labkit.course.labs.lab04.judge import check_same_training
from labkit.course.labs.lab04.uneven import check_eval_loss
from labkit.course.labs.lab04.wrapping import check_wrap

__all__ = ["check_collectives", "check_eval_loss", "check_event_order", "check_same_training", "check_wrap"]

"""The course's model, its text, its training loop and its checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.base.lazy import lazy_names

if TYPE_CHECKING:
    from labkit.spmd.model.initialize import build_model, init_weights
    from labkit.spmd.model.text import BatchSampler, english_text
    from labkit.spmd.model.training import train
    from labkit.spmd.model.transformer import Block, ModelConfig, Transformer, next_token_loss
    from labkit.spmd.model.travelling import CourseRun, course_checkpoint, leave_checkpoint

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "initialize": "build_model init_weights",
        "text": "BatchSampler english_text",
        "training": "train",
        "transformer": "Block ModelConfig Transformer next_token_loss",
        "travelling": "CourseRun course_checkpoint leave_checkpoint",
    },
)

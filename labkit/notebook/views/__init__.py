"""Views that change while a reader looks at them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.base.lazy import lazy_names

if TYPE_CHECKING:
    from labkit.notebook.views.checkpoint_browser import browse
    from labkit.notebook.views.planning import planner

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "checkpoint_browser": "browse",
        "planning": "planner",
    },
)

"""What only notebook 07 needs: mainly checks of its exercises, each of which measures what the learner's code does."""

from __future__ import annotations

from labkit.course.labs.lab07.between import check_between_bytes
from labkit.course.labs.lab07.by_node import check_all_reduce_by_node
from labkit.course.labs.lab07.lost import check_lost_names
from labkit.course.labs.lab07.nodes import num_nodes
from labkit.course.labs.lab07.plan_table import plan_table
from labkit.course.labs.lab07.tables import table

__all__ = ["check_all_reduce_by_node", "check_between_bytes", "check_lost_names", "num_nodes", "plan_table", "table"]

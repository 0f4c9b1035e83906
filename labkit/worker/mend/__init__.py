"""Repair of a rank after a run was cut off."""

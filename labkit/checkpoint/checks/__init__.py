"""Checks of a checkpoint, and the findings that they report."""

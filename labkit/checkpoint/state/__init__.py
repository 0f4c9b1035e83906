"""Splitting of a training state into flat leaves, and restoring it."""

"""Rewriting a checkpoint: into another format, under other names, or for another number of ranks."""

"""Ways to start workers."""

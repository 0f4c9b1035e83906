"""The start of a rank's process, and its end together with its controller."""

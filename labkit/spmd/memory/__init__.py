"""The memory of a training step: predicted, measured, and over time."""

"""Offload of activations to host memory, its measurements and its plan."""

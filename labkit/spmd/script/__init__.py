"""The runtime of a script made from a notebook, under torchrun."""

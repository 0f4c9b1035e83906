"""The state of the present run, shared between threads and between the ranks of a machine."""

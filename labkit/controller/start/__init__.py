"""The start of a pool's ranks on this machine, and the ways to start a worker."""

"""The part of labkit that runs in the kernel: the pool, the start of its workers, and the handling of their reports."""

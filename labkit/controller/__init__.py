"""What lives in the kernel: the pool, how its workers are started, what is made of what they report."""

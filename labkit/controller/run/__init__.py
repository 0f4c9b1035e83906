"""One run on the ranks: send it, wait, show its output, repair, report."""

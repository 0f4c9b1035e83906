"""One message at a time: the loop of a rank, its shell and its output."""

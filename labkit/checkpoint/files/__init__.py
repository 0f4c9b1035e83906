"""Access to files that may be hostile, damaged, or too large for the page cache."""

"""Reading of tensors and values, and comparison of the ranks' files."""

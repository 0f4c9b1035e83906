"""What is to be written: tensors with the sources of their values, and values."""

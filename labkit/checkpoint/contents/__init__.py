"""Contents of a checkpoint to write: tensors with the sources of their values, and values."""

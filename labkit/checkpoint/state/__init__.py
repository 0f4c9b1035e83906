"""A training state taken apart into flat leaves, and put back."""

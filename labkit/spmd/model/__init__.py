"""The course's model, its text, its training loop and its checkpoint."""

"""Saving a training state as steps in a folder, and loading one back."""

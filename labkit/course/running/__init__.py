"""Execution of notebooks without a browser."""

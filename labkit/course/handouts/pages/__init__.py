"""Notebooks as self-contained pages, on screen and on paper."""

"""The checks of each notebook's exercises."""

"""Reading of pickles without running anything that they name."""

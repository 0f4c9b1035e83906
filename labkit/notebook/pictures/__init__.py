"""Pictures for notebooks, each drawn from records."""

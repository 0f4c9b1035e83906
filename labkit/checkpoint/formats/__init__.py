"""Reading of each format's index, and the decision which format a path has."""

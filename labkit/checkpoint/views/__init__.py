"""Views of a checkpoint: as data for programs, as a table, and as a picture."""

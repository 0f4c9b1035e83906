"""The copies of a notebook for students and for the instructor."""

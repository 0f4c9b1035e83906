"""The code that runs in each rank's process."""

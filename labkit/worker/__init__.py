"""What lives in each rank's process."""

"""Writing of files in each format, beside the destination, so that it is complete when it appears."""

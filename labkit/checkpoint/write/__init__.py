"""Writing of files: in each format, beside the destination, complete before it appears."""

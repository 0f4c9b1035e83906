"""A checkpoint's index in memory: entries, names, boxes, sections, the manifest."""

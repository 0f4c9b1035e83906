"""The protocol between controller and workers: the messages, how they are packed, and how they travel."""

"""What controller and workers share: the messages, how they are packed, and how they travel."""

"""The machines of an attached pool and their agents."""

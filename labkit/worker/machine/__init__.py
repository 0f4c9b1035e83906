"""The agent of one machine of an attached pool."""

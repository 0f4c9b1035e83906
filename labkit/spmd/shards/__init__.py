"""Sharding of a model, and descriptions of the shards that a rank holds."""

"""Multi-device sharding of a cache, and loops inside `shard_map`."""

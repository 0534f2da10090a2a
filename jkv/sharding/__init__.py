"""Multi-device sharding of a cache."""

"""Cache configurations, validated before any array is allocated."""

from jkv.config.cache_config import CacheConfig

__all__ = ["CacheConfig"]

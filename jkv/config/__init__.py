"""The sizes of a cache, checked before anything is allocated."""

from jkv.config.cache_config import CacheConfig

__all__ = ["CacheConfig"]

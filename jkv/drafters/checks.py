"""Checks of the fields of drafters."""

from jkv.config.cache_config import CacheConfig
from jkv.status import UsageError


def check_function(name: str, value: object) -> None:
    """Refuse a value that cannot be called."""
    if not callable(value):
        raise UsageError(
            f"{name} must be a function over weights and rows, got {value!r:.60}"
        )


def check_config(config: object) -> None:
    """Refuse another value than the sizes of attention layers."""
    if not isinstance(config, CacheConfig):
        raise UsageError(
            f"config must be a jkv.CacheConfig, the sizes of the drafter's layers, got "
            f"{config!r:.60}"
        )


def check_layer_number(name: str, number: object) -> None:
    """Refuse another value than the number of a layer."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise UsageError(
            f"{name} must be the number of the target's layers, an int, got {number!r}"
        )

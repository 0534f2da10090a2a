"""Configurations of a cache, and the readers of a model's config.json or GGUF file.

Start with `cache_config.CacheConfig` and `layout.lay_out`, which returns every array of
a cache. `grouped_config` has several groups of layers; `huggingface.read_sizes` reads a
config.json by the rows of `families.FAMILIES`. The readers serve loaders of weights,
which plan the layers that the cache plans.
"""

from typing import TYPE_CHECKING

from jkv.lazy import imports_later

if TYPE_CHECKING:  # imported on first use
    from jkv.config.cache_config import CacheConfig
    from jkv.config.counts import human_bytes, parse_bytes
    from jkv.config.families import (
        BOTH,
        BOTH_WINDOWED,
        FAMILIES,
        FULL,
        STATE,
        WINDOWED,
        Family,
        all_windowed,
        early_windowed,
        find_family,
        late_windowed,
    )
    from jkv.config.gguf_file import (
        SUFFIX,
        GGUFile,
        describe_model,
        find_file,
        read_file,
    )
    from jkv.config.grouped_config import GroupedConfig, as_grouped
    from jkv.config.layer_kinds import (
        is_switched_off,
        list_heads,
        list_states,
        list_windows,
        name_layers,
    )
    from jkv.config.layers import Heads, LayerState
    from jkv.config.state_config import StateConfig

__getattr__ = imports_later(
    __name__,
    {
        "jkv.config.cache_config": "CacheConfig",
        "jkv.config.counts": "human_bytes parse_bytes",
        "jkv.config.families": (
            "BOTH BOTH_WINDOWED FAMILIES FULL Family STATE WINDOWED all_windowed "
            "early_windowed find_family late_windowed"
        ),
        "jkv.config.gguf_file": "GGUFile SUFFIX describe_model find_file read_file",
        "jkv.config.grouped_config": "GroupedConfig as_grouped",
        "jkv.config.layer_kinds": (
            "is_switched_off list_heads list_states list_windows name_layers"
        ),
        "jkv.config.layers": "Heads LayerState",
        "jkv.config.state_config": "StateConfig",
    },
)

__all__ = [
    "BOTH",
    "BOTH_WINDOWED",
    "FAMILIES",
    "FULL",
    "STATE",
    "SUFFIX",
    "WINDOWED",
    "CacheConfig",
    "Family",
    "GGUFile",
    "GroupedConfig",
    "Heads",
    "LayerState",
    "StateConfig",
    "all_windowed",
    "as_grouped",
    "describe_model",
    "early_windowed",
    "find_family",
    "find_file",
    "human_bytes",
    "is_switched_off",
    "late_windowed",
    "list_heads",
    "list_states",
    "list_windows",
    "name_layers",
    "parse_bytes",
    "read_file",
]

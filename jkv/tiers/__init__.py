"""KV cache offloading: spill cached blocks to host memory and disk; restore them.

`spilling` copies the least recently used cached blocks to the host as a `Spilled`
(`spilled`), `restoring` copies them back, and `store` keeps them by their tokens, with
a folder (`folder`) as a second tier. Start with `spill` and `restore`; an engine does
both between two windows (`jkv.serving`).
"""

from jkv.tiers.choosing import count_blank, count_next
from jkv.tiers.restoring import restore, warm_up
from jkv.tiers.spilled import Layout, Spilled
from jkv.tiers.spilling import (
    check_stores_tokens,
    copy_prefix,
    spill,
    stores_tokens,
    take,
)
from jkv.tiers.store import BlockStore, Names

__all__ = [
    "BlockStore",
    "Layout",
    "Names",
    "Spilled",
    "check_stores_tokens",
    "copy_prefix",
    "count_blank",
    "count_next",
    "stores_tokens",
    "restore",
    "spill",
    "take",
    "warm_up",
]

"""The optional prefix index, which maps prompt prefixes to full blocks.

`index.PrefixIndex` overrides the methods of `jkv.state.NoIndex` with the functions of
this package: start with `prompt_search.find`, the look-up of `allocate`, and
`commitment.commit`, which adds the blocks that a step filled. `verbs` has the public
functions that only a cache with an index needs.
"""

from jkv.prefixes.verbs import (
    clear_prefixes,
    demote,
    evict_cached,
    invalidate,
    match,
)

__all__ = [
    "clear_prefixes",
    "demote",
    "evict_cached",
    "invalidate",
    "match",
]

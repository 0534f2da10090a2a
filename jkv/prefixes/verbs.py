"""Prefix caching: match, snapshots, and eviction of cached contents.

`append` records the tokens of a step; `commit`, once their keys and values are written,
indexes the blocks they filled. `allocate` finds them. A freed block keeps its contents
until the pool evicts it in LRU order.

Only blocks computed from indexed blocks are indexed: a sequence with a gap in its chain
(a step not committed, a token not recorded, a full bucket) commits no more.
"""

import jax
import jax.numpy as jnp

from jkv.arguments import as_index
from jkv.metadata import allocator, requests, ring
from jkv.metadata.requests import Integer, IntegerRows, Integers
from jkv.operations import gather, running_sum, scatter
from jkv.prefixes import prefix_index, prompt_search
from jkv.prefixes.prefix_index import index_of, with_index
from jkv.prefixes.snapshots import are_oldest, forget_snapshots, snapshots_of
from jkv.state import Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.verbs.lookups import length_of, row_of


@takes_cache()
def match(cache: Cache, tokens: IntegerRows, salts: Integers = 0) -> jax.Array:
    """Return the number of cached tokens that `allocate` would find now.

    Args:
      cache: a cache with `prefix_caching`.
      tokens: i32[B, P], the prompts, padded with -1, or a list of token ids for each.
      salts: i32[B] or int, cache salts.

    Returns:
      i32[B], prompt tokens that need no computation, never the whole prompt.

    Raises:
      ValueError: if the cache has no index, or an argument has the wrong type or shape.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig.toy(prefix_caching=True)
      >>> cache, opened = jkv.allocate(jkv.init(config), 0)
      >>> prompt = jnp.arange(10)
      >>> cache, batch = jkv.append(cache, 0, 10, capacity=10, tokens=prompt)
      >>> cache = jkv.commit(cache, batch)  # after the last layer's write
      >>> jkv.match(cache, prompt[None]).tolist()
      [8]
    """
    prompts = requests.as_prompts(tokens)
    salts = requests.as_salts("salts", salts)
    (salts,) = requests.broadcast(prompts.shape[0], salts=salts)
    index_of(cache.metadata)
    return _match(cache.metadata, prompts, salts)


@takes_cache()
def clear_prefixes(cache: Cache) -> Cache:
    """Evict all cached contents; open sequences are unchanged, but commit no more.

    Args:
      cache: a cache with `prefix_caching`.

    Returns:
      The cache without cached prefixes, until new prompts are committed.

    Raises:
      ValueError: if the cache has no index.

    Example:
      >>> import jkv
      >>> cache = jkv.clear_prefixes(jkv.init(jkv.CacheConfig.toy(prefix_caching=True)))
    """
    index_of(cache.metadata)
    return cache.with_metadata(_forget(cache.metadata, None))


@takes_cache()
def invalidate(cache: Cache, salt: Integer) -> Cache:
    """Evict all contents of a cache salt, as when its adapter or weights change.

    Sequences with this salt are unchanged, but their tokens, present and future, are
    not found in any group of layers until they are truncated to 0 or freed. Empty
    sequences commit as usual.

    Args:
      cache: a cache with `prefix_caching`.
      salt: i32[] or int, as passed to `allocate`.

    Returns:
      The cache without cached prefixes of this salt.

    Raises:
      ValueError: if the cache has no index.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(prefix_caching=True)
      >>> cache = jkv.invalidate(jkv.init(config), salt=3)
    """
    index_of(cache.metadata)
    (salt,) = requests.broadcast(salt=requests.as_salts("salt", salt))
    return cache.with_metadata(_forget(cache.metadata, salt))


@takes_cache()
def demote(cache: Cache, older_than: Integer) -> Cache:
    """Move cached blocks with expired retention to class 0.

    They keep their contents and their place in LRU order. Unindexed blocks move to
    class 0, too; blocks of open sequences are unchanged. Makes a pass over the pool:
    call it occasionally.

    Args:
      cache: a cache with `prefix_caching`.
      older_than: u32[] or int, in the unit of `free(keep_until=)`, by default a tick of
        `jkv.clock`: blocks with a later time are unchanged.

    Returns:
      The new cache; unchanged without `keep_classes`.

    Raises:
      ValueError: if the cache has no index.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig.toy(prefix_caching=True, keep_classes=2)
      >>> cache, opened = jkv.allocate(jkv.init(config), 0)
      >>> cache, batch = jkv.append(cache, 0, 9, capacity=9, tokens=jnp.arange(9))
      >>> cache, _ = jkv.free(jkv.commit(cache, batch), 0, keep=1)
      >>> lowered = jkv.demote(cache, jkv.clock(cache))  # all that was used until now
      >>> [int(each.metadata.groups[0].free_blocks.kept.classes.sum())
      ...     for each in (cache, lowered)]
      [2, 0]
    """
    index_of(cache.metadata)
    if cache.metadata.num_classes == 1:
        return cache
    bits = requests.as_salts("older_than", older_than)
    (time,) = requests.broadcast(older_than=bits)
    return cache.with_metadata(_demote(cache.metadata, time))


@takes_cache()
def evict_cached(cache: Cache, num_blocks: Integer) -> Cache:
    """Evict the contents of the least recently used cached blocks.

    The blocks were free and stay free, but are not found any more. A block is evicted
    before its ancestors. With several groups of layers, `num_blocks` of the blocks
    cached before the call are evicted in each group with blocks; if no group has
    blocks, that many snapshots.

    Args:
      cache: a cache with `prefix_caching`.
      num_blocks: i32[] or int, for each group; all cached ones if there are fewer.

    Returns:
      The cache with the same number of free blocks.

    Raises:
      ValueError: if the cache has no index.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(prefix_caching=True)
      >>> cache = jkv.evict_cached(jkv.init(config), 2)
    """
    index_of(cache.metadata)
    count = as_index(num_blocks)
    return cache.with_metadata(_evict_cached(cache.metadata, count))


@takes_cache()
def snapshots(cache: Cache, seq_id: Integer) -> jax.Array:
    """Return the lengths of a sequence at which its states have a snapshot.

    `truncate`, and `fork` with lengths, can return to them.

    Args:
      cache: the cache.
      seq_id: i32[] or int; may be traced.

    Returns:
      bool[max_context_length + 1]; all False for a closed id, and without
      recurrent-state layers or prefix caching.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.GroupedConfig(groups=(jkv.StateConfig(
      ...     num_layers=1, arrays={"sum": ((3,), "float32")}, max_sequences=2,
      ...     max_context_length=8, block_size=2, num_snapshots=4, snapshot_every=4),),
      ...     layer_groups=(0,), prefix_caching=True)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, batch = jkv.append(cache, [0], [4], capacity=4, tokens=jnp.arange(4))
      >>> cache = jkv.commit(cache, batch)  # after the last layer's write_state
      >>> jnp.flatnonzero(jkv.snapshots(cache, 0)).tolist()
      [4]
    """
    if cache.metadata.index.snapshot_every is None:
        return jnp.zeros((cache.max_context_length + 1,), bool)
    return _snapshots(cache.metadata, as_index(seq_id))


@jax.jit
def _match(metadata: Metadata, tokens: jax.Array, salts: jax.Array) -> jax.Array:
    found = prompt_search.find(metadata, tokens, salts)
    return found.num_tokens(metadata.block_size)


@jax.jit
def _snapshots(metadata: Metadata, seq_id: jax.Array) -> jax.Array:
    known, length = snapshots_of(metadata), metadata.max_context_length
    assert known is not None
    row = row_of(metadata, seq_id)
    tokens = gather(known.sequence_tokens, row, fill=-1)
    salt = index_of(metadata).read(row).salt
    position = jnp.arange(length, dtype=jnp.int32)[None]
    counts = position < known.lengths[:, None]
    alike = jnp.all((known.tokens == tokens[None]) | ~counts, axis=1)
    alike &= known.salts == salt
    alike &= known.lengths <= length_of(metadata, seq_id)
    at = jnp.where(alike & (known.lengths > 0), known.lengths, length + 1)
    return scatter(jnp.zeros((length + 1,), bool), at, True)


@jax.jit
def _evict_cached(metadata: Metadata, num_blocks: jax.Array) -> Metadata:
    if not metadata.block_numbers:
        return forget_snapshots(metadata, lambda known: are_oldest(known, num_blocks))
    # The leading group last: blocks of other groups lose their pairs with the leader's.
    for number in (*metadata.followers, metadata.leader):
        metadata, evicted = _evict_from(metadata, number, num_blocks)
        # Always true; orders the next group's writes after this one's reads.
        num_blocks = jnp.where(evicted >= 0, num_blocks, 0)
    return metadata


def _evict_from(
    metadata: Metadata, number: int, num_blocks: jax.Array
) -> tuple[Metadata, jax.Array]:
    """Evict the least recently used cached blocks of one group; count them."""
    group = metadata.groups[number]
    Carry = tuple[Metadata, jax.Array]

    def visit(carry: Carry, block: jax.Array, is_entry: jax.Array) -> Carry:
        metadata, evicted = carry
        is_cached = prefix_index.is_known(metadata, number, block) & is_entry
        rank = running_sum(is_cached.astype(jnp.int32))
        goes = is_cached & (evicted + rank <= num_blocks)
        gone = jnp.where(goes, block, group.num_blocks)
        metadata = prefix_index.forget_blocks(metadata, number, gone)
        metadata = allocator.lower(metadata, number, gone)
        return metadata, evicted + jnp.sum(goes, dtype=jnp.int32)

    metadata, evicted = ring.scan(
        group.free_blocks,
        lambda carry: carry[1] < num_blocks,
        visit,
        (metadata, jnp.int32(0)),
    )
    return allocator.count_forgotten(metadata, number, evicted), evicted


@jax.jit
def _forget(metadata: Metadata, salt: jax.Array | None) -> Metadata:
    """Evict the blocks of one salt, or of all, and stop its sequences' commits.

    Blocks of other groups are found through the leader's and need no update. Snapshots
    of the salt are removed, too.
    """
    index = index_of(metadata)
    metadata = forget_snapshots(
        metadata, lambda known: salt is None or known.salts == salt
    )
    in_domain = True if salt is None else index.salts == salt
    is_listed = True if salt is None else index.sequence_salts == salt
    # A sequence without tokens has no stale contents and no step in flight.
    is_stale = is_listed & (metadata.context_lengths > 0)
    metadata = with_index(
        metadata,
        hashes=jnp.where(in_domain, jnp.uint32(0), index.hashes),
        rows=index.with_committed(jnp.where(is_stale, -1, index.committed)).rows,
    )
    return _demote(metadata, None)


@jax.jit
def _demote(metadata: Metadata, bits: jax.Array | None) -> Metadata:
    """Move unindexed blocks and, given `bits`, expired ones to class 0."""
    for number in metadata.block_numbers:
        group = metadata.groups[number]
        kept = group.free_blocks.kept
        if kept is None:
            continue
        block = jnp.arange(group.num_blocks, dtype=jnp.int32)
        stays = metadata.index.knows(metadata, number, block)
        if bits is not None:
            time = jax.lax.bitcast_convert_type(bits, jnp.uint32)
            stays &= (group.reference_counts > 0) | (kept.kept_until > time)
        free = ring.arrange(group.free_blocks, stays)
        metadata = metadata.changed(number, free_blocks=free)
    return metadata

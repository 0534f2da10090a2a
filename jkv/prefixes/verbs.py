"""Reuse of prefixes: match, snapshots, and forgetting what was cached.

`append` records the tokens of a step; `commit`, once their keys and values are written,
makes the blocks they filled visible. `allocate` finds them. A freed block keeps what it
holds until the pool hands it out again, the least recently used first.

Only what was computed from visible blocks becomes visible itself: a sequence whose
chain has a gap (a step not committed, a token not told, a full bucket) adds no more.
"""

import jax
import jax.numpy as jnp

from jkv.indexing import gather, scatter
from jkv.metadata import allocator, requests, ring
from jkv.metadata.requests import Integer, Integers, Texts
from jkv.metadata.xla_cpu import running_sum
from jkv.prefixes import prefix_index, prompt_search
from jkv.prefixes.prefix_index import index_of, with_index
from jkv.prefixes.snapshots import are_oldest, forget_snapshots, snapshots_of
from jkv.state import Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.verbs.lookups import length_of, row_of


@takes_cache()
def match(cache: Cache, tokens: Texts, salts: Integers = 0) -> jax.Array:
    """Tell how many tokens of each prompt `allocate` would find now.

    Args:
      cache: a cache with `prefix_caching`.
      tokens: i32[B, P], the prompts, -1 after each one's end, or a list of token ids
        for each.
      salts: i32[B] or int, the domains to look in.

    Returns:
      i32[B], tokens that need not be computed, never the whole prompt.

    Raises:
      ValueError: for a cache without an index, or arguments of wrong type or shape.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16,
      ...     prefix_caching=True)
      >>> cache, opened = jkv.allocate(jkv.init(config), 0)
      >>> prompt = jnp.arange(10)
      >>> cache, batch = jkv.append(cache, 0, 10, capacity=10, tokens=prompt)
      >>> cache = jkv.commit(cache, batch)  # after the last layer's write
      >>> jkv.match(cache, prompt[None]).tolist()
      [8]
    """
    prompts = requests.as_prompts(tokens)
    salts = requests.as_domains("salts", salts)
    (domains,) = requests.broadcast(prompts.shape[0], salts=salts)
    index_of(cache.metadata)
    return _match(cache.metadata, prompts, domains)


@takes_cache()
def clear_prefixes(cache: Cache) -> Cache:
    """Forget all cached contents; sequences stay as they are, but add no more.

    Args:
      cache: a cache with `prefix_caching`.

    Returns:
      The cache, in which nothing is found until new prompts are committed.

    Raises:
      ValueError: for a cache without an index.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16, prefix_caching=True)
      >>> cache = jkv.clear_prefixes(jkv.init(config))
    """
    index_of(cache.metadata)
    return cache.with_metadata(_forget(cache.metadata, None))


@takes_cache()
def invalidate(cache: Cache, salt: Integer) -> Cache:
    """Forget one domain, as when its adapter or weights change.

    Sequences of the domain stay as they are; what they hold and what they append is not
    found any more, in no group of layers, until they are cut back to nothing or freed.
    An open sequence without a token has nothing out of date: what it appends becomes
    visible as ever.

    Args:
      cache: a cache with `prefix_caching`.
      salt: i32[] or int, as given to `allocate`.

    Returns:
      The cache, in which nothing of the domain is found.

    Raises:
      ValueError: for a cache without an index.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16, prefix_caching=True)
      >>> cache = jkv.invalidate(jkv.init(config), salt=3)
    """
    index_of(cache.metadata)
    (domain,) = requests.broadcast(salt=requests.as_domains("salt", salt))
    return cache.with_metadata(_forget(cache.metadata, domain))


@takes_cache()
def demote(cache: Cache, older_than: Integer) -> Cache:
    """Let cached blocks that were not used for long be of class 0.

    There they stand where their last use puts them, and hold what they held. Blocks
    that hold nothing any more go there, too, those of open sequences stay as they are.
    A pass over the pool, for now and then.

    Args:
      cache: a cache with `prefix_caching`.
      older_than: u32[] or int, a time by `jkv.clock`, or whatever `free(keep_until=)`
        is given: blocks whose time is later stay as they are.

    Returns:
      The cache; one without `keep_classes` as it is.

    Raises:
      ValueError: for a cache without an index.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, block_size=4, max_sequences=2, max_context_length=16,
      ...     prefix_caching=True, keep_classes=2)
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
    bits = requests.as_domains("older_than", older_than)
    (time,) = requests.broadcast(older_than=bits)
    return cache.with_metadata(_demote(cache.metadata, time))


@takes_cache()
def evict_cached(cache: Cache, num_blocks: Integer) -> Cache:
    """Forget the least recently used cached blocks.

    They were free and stay free; only their contents are not found any more. A block
    goes before the blocks that lead up to it. With groups of layers so many go in each
    group with blocks, of those that are cached there before the call; where no group
    has any, so many snapshots go instead.

    Args:
      cache: a cache with `prefix_caching`.
      num_blocks: i32[] or int, of each group; all cached ones if there are no more.

    Returns:
      The cache; as many blocks are free as before.

    Raises:
      ValueError: for a cache without an index.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16, prefix_caching=True)
      >>> cache = jkv.evict_cached(jkv.init(config), 2)
    """
    index_of(cache.metadata)
    count = requests.as_index(num_blocks)
    return cache.with_metadata(_evict_cached(cache.metadata, count))


@takes_cache()
def snapshots(cache: Cache, seq_id: Integer) -> jax.Array:
    """Tell at which lengths of a sequence there is a snapshot of its states.

    `truncate`, and `fork` with lengths, can go back to them.

    Args:
      cache: the cache.
      seq_id: i32[] or int; may be traced.

    Returns:
      bool[max_context_length + 1]; all False for an id that is not open, and without
      layers with a state or without prefix caching.

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
    return _snapshots(cache.metadata, requests.as_index(seq_id))


@jax.jit
def _match(metadata: Metadata, tokens: jax.Array, salts: jax.Array) -> jax.Array:
    found = prompt_search.find(metadata, tokens, salts)
    return found.num_tokens(metadata.block_size)


@jax.jit
def _snapshots(metadata: Metadata, seq_id: jax.Array) -> jax.Array:
    known, length = snapshots_of(metadata), metadata.max_context_length
    assert known is not None
    row = row_of(metadata, seq_id)
    text = gather(known.sequence_texts, row, fill=-1)
    salt = index_of(metadata).read(row).salt
    position = jnp.arange(length, dtype=jnp.int32)[None]
    counts = position < known.lengths[:, None]
    alike = jnp.all((known.texts == text[None]) | ~counts, axis=1)
    alike &= known.salts == salt
    alike &= known.lengths <= length_of(metadata, seq_id)
    at = jnp.where(alike & (known.lengths > 0), known.lengths, length + 1)
    return scatter(jnp.zeros((length + 1,), bool), at, True)


@jax.jit
def _evict_cached(metadata: Metadata, num_blocks: jax.Array) -> Metadata:
    if not metadata.block_numbers:
        return forget_snapshots(metadata, lambda known: are_oldest(known, num_blocks))
    # The leading group comes last: other groups have nothing cached beside what it
    # forgets.
    for number in (*metadata.followers, metadata.leader):
        metadata, evicted = _evict_from(metadata, number, num_blocks)
        # Always true: the next group's writes then come after the reads of this one.
        num_blocks = jnp.where(evicted >= 0, num_blocks, 0)
    return metadata


def _evict_from(
    metadata: Metadata, number: int, num_blocks: jax.Array
) -> tuple[Metadata, jax.Array]:
    """Forget the cached blocks of one group that have been free longest; count them."""
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
    """Forget the blocks of one domain, or of all, and let its sequences add none.

    The blocks of other groups are found beside those of the leading one: without these
    they are not. Snapshots of the domain go, too.
    """
    index = index_of(metadata)
    metadata = forget_snapshots(
        metadata, lambda known: salt is None or known.salts == salt
    )
    in_domain = True if salt is None else index.salts == salt
    is_listed = True if salt is None else index.sequence_salts == salt
    # A sequence without tokens has nothing out of date, and no step under way.
    is_stale = is_listed & (metadata.context_lengths > 0)
    metadata = with_index(
        metadata,
        hashes=jnp.where(in_domain, jnp.uint32(0), index.hashes),
        rows=index.with_committed(jnp.where(is_stale, -1, index.committed)).rows,
    )
    return _demote(metadata, None)


@jax.jit
def _demote(metadata: Metadata, bits: jax.Array | None) -> Metadata:
    """Let what holds nothing be of class 0, and what was kept until a time, as bits."""
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

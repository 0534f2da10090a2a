"""Reuse of prefixes: match, commit, and forgetting what was cached.

`append` records the tokens of a step; `commit`, once their keys and values are written,
makes the blocks they filled visible. `allocate` finds them. A freed block keeps what it
holds until the pool hands it out again, the least recently used first.

Only what was computed from visible blocks becomes visible itself: a sequence whose
chain has a gap (a step not committed, a token not told, a full bucket) adds no more.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv import counters, pool, prefix_index, requests, ring
from jkv.appending import Batch
from jkv.counters import Counter
from jkv.requests import Integers
from jkv.state import Cache, Metadata, PrefixIndex


def match(cache: Cache, tokens: jax.Array, salts: Integers = 0) -> jax.Array:
    """Return how many tokens of each prompt `allocate` would find now, i32[B].

    Args:
      cache: a cache with `prefix_caching`.
      tokens: i32[B, P], the prompts, -1 after each one's end.
      salts: i32[B] or int, the domains to look in.

    Returns:
      Tokens that need not be computed, never the whole prompt.

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
    tokens = requests.as_prompts(tokens)
    (salts,) = requests.broadcast(tokens.shape[0], salts=salts)
    prefix_index.index_of(cache.metadata)
    return _match(cache.metadata, tokens, salts)


def commit(cache: Cache, batch: Batch) -> Cache:
    """Make the blocks that this step filled visible to prefix matching.

    Call it after the last layer's `write`, and before a `fork` of what was written. A
    block equal to one that is visible already is given back, and its sequence goes on
    with the other: equal prefixes are stored once. Without a prefix index there is
    nothing to make visible, and the cache is returned as it is.

    Args:
      cache: the cache that was written.
      batch: the step. Of a sequence freed, cut back or reordered since, nothing becomes
        visible.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids)
      >>> jkv.commit(cache, batch) is cache
      True
    """
    if cache.metadata.prefix is None:
        return cache
    return dataclasses.replace(cache, metadata=_commit(cache.metadata, batch))


def clear_prefixes(cache: Cache) -> Cache:
    """Forget all cached contents; sequences stay as they are, but add no more.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16, prefix_caching=True)
      >>> cache = jkv.clear_prefixes(jkv.init(config))
    """
    prefix_index.index_of(cache.metadata)
    return dataclasses.replace(cache, metadata=_forget(cache.metadata, None))


def invalidate(cache: Cache, salt: jax.Array | int) -> Cache:
    """Forget one domain, as when its adapter or weights change.

    Sequences of the domain stay as they are; what they hold and what they append is not
    found any more, until they are cut back to nothing or freed.

    Args:
      cache: a cache with `prefix_caching`.
      salt: i32[] or int, as given to `allocate`.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16, prefix_caching=True)
      >>> cache = jkv.invalidate(jkv.init(config), salt=3)
    """
    prefix_index.index_of(cache.metadata)
    salt = jnp.asarray(salt, jnp.int32)
    return dataclasses.replace(cache, metadata=_forget(cache.metadata, salt))


def evict_cached(cache: Cache, num_blocks: jax.Array | int) -> Cache:
    """Forget the least recently used cached blocks.

    They were free and stay free; only their contents are not found any more. A block
    goes before the blocks that lead up to it.

    Args:
      cache: a cache with `prefix_caching`.
      num_blocks: i32[] or int; all cached blocks go if there are no more.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16, prefix_caching=True)
      >>> cache = jkv.evict_cached(jkv.init(config), 2)
    """
    prefix_index.index_of(cache.metadata)
    num_blocks = jnp.asarray(num_blocks, jnp.int32)
    return dataclasses.replace(
        cache, metadata=_evict_cached(cache.metadata, num_blocks)
    )


@jax.jit
def _match(metadata: Metadata, tokens: jax.Array, salts: jax.Array) -> jax.Array:
    found = prefix_index.find(metadata, tokens, salts)
    return found.num_tokens(metadata.block_size)


class _Chains(NamedTuple):
    """What a commit does for each request of its batch."""

    seq_ids: jax.Array  # i32[B]
    first: jax.Array  # i32[B], the first column to make visible
    salts: jax.Array  # i32[B]


class _Lanes(NamedTuple):
    """The columns one trip of a commit makes visible, request after request."""

    request: jax.Array  # i32[P]
    rank: jax.Array  # i32[P], columns from the request's first one
    valid: jax.Array  # bool[P]
    unbroken: jax.Array  # bool[P], the columns of earlier trips are visible


@jax.jit
def _commit(metadata: Metadata, batch: Batch) -> Metadata:
    prefix = prefix_index.index_of(metadata)
    seq_ids, size = batch.seq_ids, metadata.block_size
    assert batch.epochs is not None, "append stamps its batch if there is an index"
    committed = prefix.committed.at[seq_ids].get(mode="clip")
    current = metadata.context_lengths.at[seq_ids].get(mode="clip")
    # The step must continue what is visible, of the sequence that it was planned for.
    continues = (
        (batch.query_lengths > 0)
        & requests.is_live(metadata, seq_ids)
        & (prefix.epochs.at[seq_ids].get(mode="clip") == batch.epochs)
        & (committed == batch.context_lengths - batch.query_lengths)
        & (batch.context_lengths <= current)
    )
    first = jnp.where(continues, committed // size, 0)
    num_columns = jnp.where(continues, batch.context_lengths // size - first, 0)
    salts = prefix.sequence_salts.at[seq_ids].get(mode="clip")
    chains = _Chains(seq_ids, first, salts)

    def enter(
        carry: tuple[Metadata, jax.Array],
        _entry: jax.Array,
        request: jax.Array,
        rank: jax.Array,
        valid: jax.Array,
    ) -> tuple[Metadata, jax.Array]:
        first_lane = _first_lanes(rank)
        unbroken = carry[1][request] == rank[first_lane]
        return _commit_lanes(*carry, chains, _Lanes(request, rank, valid, unbroken))

    # No batch fills more blocks than its rows have room for, and one each.
    most = seq_ids.shape[0] + batch.num_rows // size
    metadata, lengths = requests.for_each_entry(
        num_columns, most, enter, (metadata, jnp.zeros_like(first))
    )
    visible = jnp.where(
        lengths == num_columns, batch.context_lengths, (first + lengths) * size
    )
    row = jnp.where(continues, seq_ids, metadata.max_sequences)
    prefix = prefix_index.index_of(metadata)
    prefix = dataclasses.replace(
        prefix, committed=prefix.committed.at[row].set(visible, mode="drop")
    )
    return dataclasses.replace(metadata, prefix=prefix)


def _first_lanes(rank: jax.Array) -> jax.Array:
    """Return the lane where the request of each lane begins in this trip, i32[P]."""
    return jnp.maximum(jnp.arange(rank.shape[0], dtype=jnp.int32) - rank, 0)


def _commit_lanes(
    metadata: Metadata, lengths: jax.Array, chains: _Chains, lanes: _Lanes
) -> tuple[Metadata, jax.Array]:
    """Make one full block per lane visible.

    Args:
      metadata: the state.
      lengths: i32[B], columns of each request that earlier trips made visible.
      chains: the requests.
      lanes: the blocks.

    Returns:
      The metadata and the new lengths.
    """
    nothing = metadata.num_blocks
    request, rank, valid = lanes.request, lanes.rank, lanes.valid
    salts = chains.salts[request]
    column = chains.first[request] + rank
    row = jnp.where(valid, chains.seq_ids[request], metadata.max_sequences)

    def mapped(column: jax.Array) -> jax.Array:
        column = jnp.where(column < 0, metadata.max_blocks_per_sequence, column)
        return metadata.block_tables.at[row, column].get(
            mode="fill", fill_value=nothing
        )

    block = mapped(column)
    tokens = prefix_index.tokens_of(metadata).at[block].get(mode="clip")

    # What precedes the first lane of a request is visible; from there hashes are sums.
    first_lane = _first_lanes(rank)
    is_first = first_lane == jnp.arange(rank.shape[0], dtype=jnp.int32)
    before = mapped(column - 1)
    terms = prefix_index.column_hash(tokens, column)
    sums = jnp.cumsum(terms, dtype=jnp.uint32)
    hashes_before = prefix_index.index_of(metadata).hashes.at[before].get(mode="clip")
    base = jnp.where(column == 0, prefix_index.salt_hash(salts), hashes_before)
    hashes = (base - sums + terms)[first_lane] + sums
    above = jnp.where(is_first, base, jnp.roll(hashes, 1))

    # A block that others share may follow other blocks in their rows: it only gives
    # way to an equal one. The first block that does neither ends its chain.
    owners = metadata.reference_counts.at[block].get(mode="fill", fill_value=0)
    equal = prefix_index.look_up(prefix_index.index_of(metadata), hashes)
    is_fit = jnp.all(tokens >= 0, axis=1) & ((owners == 1) | (equal < nothing))
    past_end = jnp.iinfo(jnp.int32).max
    ends = jnp.full_like(lengths, past_end)
    ends = ends.at[request].min(jnp.where(valid & ~is_fit, rank, past_end))
    asks = valid & lanes.unbroken & (rank < ends[request])
    metadata, answer = prefix_index.insert(
        metadata, jnp.where(asks, block, nothing), hashes, tokens, salts, owners == 1
    )
    entered = (answer == block) & (answer < nothing)
    parent = jnp.where(is_first, before, jnp.roll(answer, 1))
    prefix = prefix_index.index_of(metadata)
    prefix = dataclasses.replace(
        prefix,
        parents=prefix.parents.at[jnp.where(entered, block, nothing)].set(
            parent, mode="drop"
        ),
    )
    prefix, lengths = _prove(prefix, lanes, lengths, answer, parent, entered)
    is_visible = valid & (rank < lengths[request])
    listed = jnp.where(entered & is_visible, block, nothing)
    prefix = prefix_index.insert_children(prefix, listed, above)
    metadata = dataclasses.replace(metadata, prefix=prefix)

    # An equal block takes the place of the own one, which goes back to the pool.
    replaced = is_visible & ~entered
    tables = metadata.block_tables.at[
        jnp.where(replaced, row, metadata.max_sequences), column
    ].set(answer, mode="drop")
    metadata = dataclasses.replace(metadata, block_tables=tables)
    metadata = pool.add_references(metadata, jnp.where(replaced, answer, nothing))
    metadata = pool.drop_references(metadata, jnp.where(replaced, block, nothing))
    return metadata, lengths


def _prove(
    prefix: PrefixIndex,
    lanes: _Lanes,
    lengths: jax.Array,
    answer: jax.Array,
    parent: jax.Array,
    entered: jax.Array,
) -> tuple[PrefixIndex, jax.Array]:
    """Cut each chain where a block's parent is not the block before it.

    Blocks entered past a cut leave the index again, and whatever relied on them is cut
    in turn. That takes more than one round only when hashes collide.

    Returns:
      The index, and i32[B]: the columns of each chain that hold.
    """
    nothing, past_end = prefix.hashes.shape[0], jnp.iinfo(jnp.int32).max
    request, rank, valid = lanes.request, lanes.rank, lanes.valid
    follows = prefix.parents.at[answer].get(mode="clip") == parent
    reach = lengths.at[request].max(jnp.where(valid, rank + 1, 0))
    # A chain that was cut already stays at its length.
    bad_rank = jnp.where(lanes.unbroken, rank, lengths[request])

    def is_in(prefix: PrefixIndex) -> jax.Array:
        return prefix.hashes.at[answer].get(mode="fill", fill_value=0) != 0

    def cut(prefix: PrefixIndex) -> jax.Array:
        is_bad = valid & ~(is_in(prefix) & follows)
        return reach.at[request].min(jnp.where(is_bad, bad_rank, past_end))

    def lost(prefix: PrefixIndex, lengths: jax.Array) -> jax.Array:
        return entered & is_in(prefix) & (rank >= lengths[request])

    def round_(state: tuple[PrefixIndex, jax.Array]) -> tuple[PrefixIndex, jax.Array]:
        prefix = prefix_index.forget(state[0], jnp.where(lost(*state), answer, nothing))
        return prefix, cut(prefix)

    return jax.lax.while_loop(
        lambda state: jnp.any(lost(*state)), round_, (prefix, cut(prefix))
    )


@jax.jit
def _evict_cached(metadata: Metadata, num_blocks: jax.Array) -> Metadata:
    free = metadata.free_blocks
    lanes = jnp.arange(requests.ENTRIES_PER_TRIP, dtype=jnp.int32)

    # A loop, because how far the oldest lie from the head shows only on the way.
    def chunk(
        state: tuple[PrefixIndex, jax.Array, jax.Array],
    ) -> tuple[PrefixIndex, jax.Array, jax.Array]:
        prefix, start, evicted = state
        block, is_entry = pool.entries(free, prefix, start + lanes)
        is_cached = prefix.hashes.at[block].get(mode="fill", fill_value=0) != 0
        is_cached &= is_entry
        rank = ring.running_sum(is_cached.astype(jnp.int32))
        goes = is_cached & (evicted + rank <= num_blocks)
        prefix = prefix_index.forget(
            prefix, jnp.where(goes, block, metadata.num_blocks)
        )
        evicted += jnp.sum(goes, dtype=jnp.int32)
        return prefix, start + lanes.shape[0], evicted

    prefix, _, evicted = jax.lax.while_loop(
        lambda state: (state[1] < free.span) & (state[2] < num_blocks),
        chunk,
        (prefix_index.index_of(metadata), jnp.int32(0), jnp.int32(0)),
    )
    metadata = dataclasses.replace(metadata, prefix=prefix)
    return counters.add(metadata, {Counter.BLOCKS_EVICTED: evicted})


@jax.jit
def _forget(metadata: Metadata, salt: jax.Array | None) -> Metadata:
    """Forget the blocks of one domain, or of all, and let its sequences add none."""
    prefix = prefix_index.index_of(metadata)
    in_domain = True if salt is None else prefix.salts == salt
    is_listed = True if salt is None else prefix.sequence_salts == salt
    # A sequence without tokens has nothing out of date, and no step under way.
    is_stale = is_listed & (metadata.context_lengths > 0)
    prefix = dataclasses.replace(
        prefix,
        hashes=jnp.where(in_domain, jnp.uint32(0), prefix.hashes),
        committed=jnp.where(is_stale, -1, prefix.committed),
    )
    return dataclasses.replace(metadata, prefix=prefix)

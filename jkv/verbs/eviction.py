"""Lifetimes of sequences: last use, and eviction when blocks run out.

Time is the cache's logical clock, incremented by each call that serves a request. Ages
are differences of its low word, valid up to 2**32 calls. To expire sequences by wall
time, the host records the clock at that time.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import as_index
from jkv.metadata import requests
from jkv.metadata.part import close_sequences, parts_of
from jkv.metadata.requests import Integer, Integers
from jkv.operations import scatter, while_loop
from jkv.state import NO_SEQUENCE, Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.status import Counter, Status


@takes_cache()
def clock(cache: Cache) -> jax.Array:
    """Return the tick of the cache's logical clock.

    Args:
      cache: the cache.

    Returns:
      u32[], the low word of the number of calls that served a request.

    Example:
      >>> import jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0, 0])
      >>> int(jkv.clock(cache))
      1
    """
    return cache.metadata.now


@takes_cache()
def touch(cache: Cache, seq_ids: Integers) -> tuple[Cache, jax.Array]:
    """Mark sequences as used now.

    `append`, `fork` (its parents), `truncate` and `reorder` do so as well.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding.

    Returns:
      The new cache and i32[B] of `Status`: OK, or INVALID_SEQUENCE for an id that is
      not open or is repeated in this call.

    Raises:
      ValueError: if the ids are not integral or have more than one axis.

    Example:
      >>> import jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0, 0])
      >>> cache, status = jkv.touch(cache, 0)
      >>> jkv.least_recently_used(cache, 2).tolist()
      [1, 0]
    """
    (seq_ids,) = requests.broadcast(seq_ids=seq_ids)
    metadata, status = _touch(cache.metadata, seq_ids)
    return cache.with_metadata(metadata), status


@takes_cache()
def least_recently_used(
    cache: Cache, num_sequences: int, *, exclude: Integers = NO_SEQUENCE
) -> jax.Array:
    """Return the least recently used open sequences, oldest first.

    Args:
      cache: the cache.
      num_sequences: static number of sequences to return.
      exclude: i32[P] or int, sequences to skip; -1 is padding.

    Returns:
      i32[num_sequences], padded with -1. Sequences used in the same call are ordered by
      their opening, then by id.

    Raises:
      ValueError: if `num_sequences` is below 0 or above `max_sequences`.

    Example:
      >>> import jkv
      >>> cache, _ = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0, 0, 0])
      >>> cache, _ = jkv.append(cache, [0])
      >>> jkv.least_recently_used(cache, 3, exclude=1).tolist()
      [2, 0, -1]
    """
    if not 0 <= num_sequences <= cache.max_sequences:
        raise ValueError(
            f"num_sequences must be in 0..{cache.max_sequences} (max_sequences), got "
            f"{num_sequences}"
        )
    (exclude,) = requests.broadcast(exclude=exclude)
    return _oldest_first(cache.metadata, exclude)[0][:num_sequences]


@takes_cache()
def evict(
    cache: Cache, num_blocks: Integer, *, protect: Integers = NO_SEQUENCE
) -> tuple[Cache, jax.Array]:
    """Free the least recently used sequences until enough blocks are free.

    Shared blocks become free with their last sequence. If too few blocks are free after
    all unprotected sequences are freed, that is the result: check `num_free_blocks`.
    With several groups of layers, each group needs that many free blocks.

    Args:
      cache: the cache.
      num_blocks: i32[] or int, required free blocks, including those already free.
      protect: i32[P] or int, sequences to keep; -1 is padding.

    Returns:
      The new cache and the freed sequences, i32[max_sequences] in eviction order,
      padded with -1; the host reports or recomputes them.

    Raises:
      ValueError: if the ids are not integral or have more than one axis.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=4, max_sequences=3,
      ...     max_context_length=32)
      >>> cache, _ = jkv.allocate(jkv.init(config), [32, 32])
      >>> cache, refused = jkv.allocate(cache, 20)
      >>> cache, evicted = jkv.evict(cache, 2)
      >>> evicted.tolist()
      [0, -1, -1]
      >>> cache, opened = jkv.allocate(cache, 20)
      >>> refused.status.tolist(), opened.status.tolist()
      ([1], [0])
    """
    (protect,) = requests.broadcast(protect=protect)
    count = as_index(num_blocks)
    metadata, evicted = _evict(cache.metadata, count, protect)
    return cache.with_metadata(metadata), evicted


@takes_cache()
def evict_older_than(
    cache: Cache, age: Integer, *, protect: Integers = NO_SEQUENCE
) -> tuple[Cache, jax.Array]:
    """Free the sequences unused for more than `age` ticks.

    Args:
      cache: the cache.
      age: u32[] or int, ticks of the cache's clock; 0 frees sequences not used by the
        last call that served a request.
      protect: i32[P] or int, sequences to keep; -1 is padding.

    Returns:
      As `evict`.

    Raises:
      ValueError: if `age` is an int below 0 or of more than 32 bits.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=4, max_sequences=3,
      ...     max_context_length=32)
      >>> cache, _ = jkv.allocate(jkv.init(config), [0, 0])
      >>> cache, _ = jkv.append(cache, 1)
      >>> cache, evicted = jkv.evict_older_than(cache, 0)
      >>> evicted.tolist()
      [0, -1, -1]
    """
    if isinstance(age, int | np.integer):
        if not 0 <= age < 2**32:
            raise ValueError(f"age must be in 0..{2**32 - 1} ticks, got {age}")
        age = np.uint32(age)
    (protect,) = requests.broadcast(protect=protect)
    ticks = jnp.asarray(age).astype(jnp.uint32)
    metadata, evicted = _evict_older_than(cache.metadata, ticks, protect)
    return cache.with_metadata(metadata), evicted


@jax.jit
def _touch(metadata: Metadata, seq_ids: jax.Array) -> tuple[Metadata, jax.Array]:
    before = metadata.sequences.read(seq_ids)
    live = requests.is_open(metadata, seq_ids, before)
    live &= requests.is_first_mention(metadata, seq_ids)
    status = requests.find_status(
        requests.is_padding(seq_ids), [(Status.INVALID_SEQUENCE, ~live)]
    )
    row = jnp.where(live, seq_ids, metadata.max_sequences)
    metadata = requests.mark_used(metadata, row, before)
    return requests.settle(metadata, status, live), status


@jax.jit
def _oldest_first(
    metadata: Metadata, exclude: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the open sequences not excluded and their ages, oldest first.

    The ids, i32[S], are padded with -1, the ages, u32[S], with 0.
    """
    row = jnp.where(exclude < 0, metadata.max_sequences, exclude)
    listed = scatter(metadata.is_open, row, False)
    sequences = metadata.sequences
    age = jnp.where(listed, sequences.now - sequences.last_used, jnp.uint32(0))
    life = jnp.where(listed, sequences.now - sequences.created, jnp.uint32(0))
    seq_ids = jnp.arange(metadata.max_sequences, dtype=jnp.int32)
    # Ascending sort: complements put the oldest first.
    *_, seq_ids, age = jax.lax.sort(
        [(~listed).astype(jnp.int32), ~age, ~life, seq_ids, age], num_keys=4
    )
    num_listed = jnp.sum(listed, dtype=jnp.int32)
    rank = jnp.arange(metadata.max_sequences, dtype=jnp.int32)
    return jnp.where(rank < num_listed, seq_ids, NO_SEQUENCE), age


@jax.jit
def _evict(
    metadata: Metadata, num_blocks: jax.Array, protect: jax.Array
) -> tuple[Metadata, jax.Array]:
    seq_ids, _ = _oldest_first(metadata, protect)
    num_listed = jnp.sum(seq_ids != NO_SEQUENCE, dtype=jnp.int32)
    parts = parts_of(metadata)

    def lacks_blocks(metadata: Metadata) -> jax.Array:
        counts = [num for part in parts for num in part.num_free(metadata)]
        return requests.any_of([num < num_blocks for num in counts])

    # One at a time: later sequences may hold the last reference to a block.
    def close_next(state: tuple[Metadata, jax.Array]) -> tuple[Metadata, jax.Array]:
        metadata, i = state
        seq_id = jax.lax.dynamic_slice(seq_ids, (i,), (1,))
        closed = close_sequences(metadata, seq_id, jnp.ones((1,), bool))
        return closed, i + 1

    metadata, num = while_loop(
        lambda state: lacks_blocks(state[0]) & (state[1] < num_listed),
        close_next,
        (metadata, jnp.int32(0)),
    )
    return _count_evicted(metadata, seq_ids, num)


@jax.jit
def _evict_older_than(
    metadata: Metadata, age: jax.Array, protect: jax.Array
) -> tuple[Metadata, jax.Array]:
    seq_ids, ages = _oldest_first(metadata, protect)
    old = (seq_ids != NO_SEQUENCE) & (ages > age)
    metadata = close_sequences(metadata, seq_ids, old)
    return _count_evicted(metadata, seq_ids, jnp.sum(old, dtype=jnp.int32))


def _count_evicted(
    metadata: Metadata, seq_ids: jax.Array, num: jax.Array
) -> tuple[Metadata, jax.Array]:
    """Count the first `num` sequences as evicted; return only these."""
    rank = jnp.arange(seq_ids.shape[0], dtype=jnp.int32)
    ticks = jnp.minimum(num, 1)
    increments = {Counter.CLOCK: ticks, Counter.SEQUENCES_EVICTED: num}
    metadata = requests.add_counts(metadata, increments)
    return metadata, jnp.where(rank < num, seq_ids, NO_SEQUENCE)

"""truncate: drop tokens from the end of sequences."""

import jax
import jax.numpy as jnp

from jkv.metadata import counters, requests
from jkv.metadata.part import Done, Moves, apply_plans, parts_of
from jkv.metadata.requests import Integers
from jkv.state import Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.status import Status


@takes_cache()
def truncate(
    cache: Cache, seq_ids: Integers, lengths: Integers
) -> tuple[Cache, jax.Array]:
    """Drop tokens from the end of sequences, and all blocks past the new length.

    Reserved blocks are released too. If the new last block is partly filled and shared,
    the sequence gets a copy, which takes a block that is free before the call. An
    unshared one is kept, and its entry in the prefix index past the cut is removed.
    Outside jit the host checks if a block must be copied, and then copies the whole
    storage: jit and donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding.
      lengths: i32[B] or int, tokens to keep, 0 to the context length. With a sliding
        window the window of the next row must be cached: the last `append` can always
        be undone, and 0 is always allowed; a length among the first `num_sink_tokens`
        is too short once blocks after the sinks are released. Recurrent-state layers
        have a state at 0, at the current length, at the pending tokens (`append`), and
        at snapshots (`snapshots`).

    Returns:
      The new cache and i32[B] of `Status`: OK, INVALID_SEQUENCE, INVALID_ARGUMENT (a
      length below 0, above the current one, below the window or without a state) or
      OUT_OF_BLOCKS.

    Raises:
      ValueError: if an argument is not integral, has more than one axis, or differs in
        length.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=4, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, _ = jkv.append(cache, [0], [10], capacity=10)
      >>> cache, status = jkv.truncate(cache, [0], [5])
      >>> int(cache.metadata.context_lengths[0]), int(jkv.num_free_blocks(cache))
      (5, 6)
    """
    seq_ids, lengths = requests.broadcast(seq_ids=seq_ids, lengths=lengths)
    metadata, status, moves = _truncate(cache.metadata, seq_ids, lengths)
    return cache.follow(metadata, moves), status


@jax.jit
def _truncate(
    metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
) -> tuple[Metadata, jax.Array, tuple[Moves, ...]]:
    padding = requests.is_padding(seq_ids)
    before = metadata.sequences.read(seq_ids)
    live = requests.is_open(metadata, seq_ids, before)
    live &= requests.is_first_mention(metadata, seq_ids)
    outside = (lengths < 0) | (lengths > before.context_length)
    looks = [part.cut(metadata, seq_ids, lengths) for part in parts_of(metadata)]
    wrong = requests.any_of([outside, *(m for look in looks for m in look.wrongs)])
    causes = [(Status.INVALID_SEQUENCE, ~live), (Status.INVALID_ARGUMENT, wrong)]
    status = requests.find_status(padding, causes)
    eligible = (status == Status.OK) & ~padding
    lengths = jnp.where(eligible, lengths, 0)
    plans = [look.judge(eligible) for look in looks]
    no_block = requests.agree([plan.lacks for plan in plans]).no_block
    status = jnp.where(no_block, jnp.int32(Status.OUT_OF_BLOCKS), status)
    served = eligible & ~no_block

    done = Done(served, seq_ids)
    metadata, moves = apply_plans(metadata, plans, done)
    row = done.rows(metadata)
    metadata = metadata.index.cut(metadata, row, lengths)
    metadata = counters.mark_used(metadata, row, before, lengths)
    return counters.settle(metadata, status, served), status, moves

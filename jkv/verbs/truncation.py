"""truncate: tokens dropped from the end of sequences."""

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
    """Drop tokens from the end of sequences, and every block past the new length.

    Reserved blocks go too. If the new last block is partly filled and shared, the
    sequence gets a copy of its own, which takes a block free before the call. One that
    no other sequence shares is kept, and what the prefix index knew past the cut is
    forgotten.
    Outside jit this looks on the host whether a block must be copied, and copies the
    storage if so: jit and donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding.
      lengths: i32[B] or int, tokens to keep, 0 to the context length. With a sliding
        window, what the row after them sees must be kept still: the last `append` can
        always be undone, and a sequence can begin anew from 0. A length among the
        first `num_sink_tokens` is too short, once blocks behind the sinks are given
        back, though the sinks themselves are kept. Layers with a state have it at 0, at
        the present length, at those of the tokens that are pending (`append`), and
        where a snapshot of the text is (`snapshots`).

    Returns:
      The new cache and i32[B] of `Status`: OK, INVALID_SEQUENCE, INVALID_ARGUMENT (a
      length below 0, above the current one, below the window or where no state is) or
      OUT_OF_BLOCKS.

    Raises:
      ValueError: for arguments that are no integers, have more than one axis, or differ
        in length.

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

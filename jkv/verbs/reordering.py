"""reorder: the step of a beam search."""

import jax
import jax.numpy as jnp

from jkv.blocks import sharing
from jkv.metadata import counters, requests
from jkv.metadata.part import Done, Exchanging, Moves, apply_plans, parts_of
from jkv.metadata.requests import Integers
from jkv.metadata.xla_cpu import running_sum
from jkv.sharding.loops import while_loop
from jkv.state import Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.status import Status


@takes_cache()
def reorder(
    cache: Cache, seq_ids: Integers, parents: Integers
) -> tuple[Cache, jax.Array]:
    """Let sequence i continue from what its parent was before the call (beam search).

    All requests happen at once: sequences may swap. One that is its own parent stays as
    it is, reservation, last use and prefix included, and needs no block; any other
    gives up all its blocks and shares the parent's full ones, with a copy of a partly
    filled last block. Blocks that the sequences of the call give up can be taken in the
    same call. Outside jit this looks on the host whether a block must be copied, and
    copies the storage if so: jit and donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int, sequences to change; -1 is padding.
      parents: i32[B] or int, open sequences, in the call or not; may repeat.

    Returns:
      The new cache and i32[B] of `Status`: OK, INVALID_SEQUENCE (either id) or
      OUT_OF_BLOCKS. If not all fit, the requests that need no block and the longest run
      of the others, in order, that fits together are served.

    Raises:
      ValueError: for arguments that are no integers, have more than one axis, or differ
        in length.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, block_size=4, max_sequences=2, max_context_length=8)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0, 0])
      >>> cache, _ = jkv.append(cache, [0, 1], [5, 5], capacity=10)
      >>> cache, status = jkv.reorder(cache, [0, 1], [1, 1])
      >>> [jkv.block_ids(cache, i).tolist() for i in (0, 1)]
      [[2, 1], [2, 3]]
    """
    seq_ids, parents = requests.broadcast(seq_ids=seq_ids, parents=parents)
    metadata, status, moves = _reorder(cache.metadata, seq_ids, parents)
    return cache.follow(metadata, moves), status


@jax.jit
def _reorder(
    metadata: Metadata, seq_ids: jax.Array, parents: jax.Array
) -> tuple[Metadata, jax.Array, tuple[Moves, ...]]:
    padding = requests.is_padding(seq_ids)
    before = metadata.sequences.read(seq_ids)
    live = requests.is_open(metadata, seq_ids, before)
    live &= requests.is_first_mention(metadata, seq_ids)
    live &= requests.is_live(metadata, parents)
    changes = live & ~padding & (seq_ids != parents)
    length = sharing.find_lengths(metadata, parents)
    plans = [
        part.exchange(metadata, seq_ids, parents, length) for part in parts_of(metadata)
    ]
    no_block = _lacks_blocks(metadata, plans, changes, changes & (length.tail > 0))
    status = requests.find_status(
        padding, [(Status.INVALID_SEQUENCE, ~live), (Status.OUT_OF_BLOCKS, no_block)]
    )
    served = changes & ~no_block
    done = Done(served, seq_ids)
    metadata, moves = apply_plans(metadata, plans, done)
    row = done.rows(metadata)
    metadata = metadata.index.inherit(metadata, row, parents, length.tokens, True)
    metadata = counters.mark_used(metadata, row, before, length.tokens)
    return counters.settle(metadata, status, served), status, moves


def _lacks_blocks(
    metadata: Metadata, plans: list[Exchanging], changes: jax.Array, needs: jax.Array
) -> jax.Array:
    """Return which requests find no block for their tail in some pool, bool[B].

    Those that change something need one in each pool, or none, bool[B]. Usually the
    free blocks suffice and the loop makes no trip. Else ever fewer requests are tried,
    with what they would give up.
    """
    parts = parts_of(metadata)
    if not any(part.num_free(metadata) for part in parts):  # there is no pool
        return jnp.zeros_like(needs)
    rank = running_sum(needs.astype(jnp.int32))
    wanted = rank[-1] if rank.shape[0] else jnp.int32(0)

    def reaches(metadata: Metadata, num: jax.Array) -> jax.Array:
        counts = [count for part in parts for count in part.num_free(metadata)]
        return ~requests.any_of([num > count for count in counts])

    def try_fewer(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        num_served, _ = state
        served, tried = changes & ~(needs & (rank > num_served)), metadata
        for plan in plans:
            tried = plan.release(tried, served)
        fits = reaches(tried, num_served)
        return jnp.where(fits, num_served, num_served - 1), fits

    num_served, _ = while_loop(
        lambda state: ~state[1], try_fewer, (wanted, reaches(metadata, wanted))
    )
    return needs & (rank > num_served)

"""reorder: replace sequences by their parents, for beam search."""

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
    """Replace each sequence by its parent as before the call, for beam search.

    All requests apply at once: sequences may swap. A sequence that is its own parent is
    unchanged, including reservation, last use and prefix, and needs no block. Others
    release their blocks and share the parent's full ones, with a copy of a partly
    filled last block. Blocks released in the call can be taken in the same call.
    Outside jit the host checks if a block must be copied, and then copies the whole
    storage: jit and donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int, sequences to replace; -1 is padding.
      parents: i32[B] or int, open sequences, which may repeat.

    Returns:
      The new cache and i32[B] of `Status`: OK, INVALID_SEQUENCE (either id) or
      OUT_OF_BLOCKS. If not all fit, all requests without need of blocks are served, and
      the longest prefix of the others that fits together.

    Raises:
      ValueError: if an argument is not integral, has more than one axis, or differs in
        length.

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
    """Return requests without a free block for their tail in some pool, bool[B].

    A changing request needs one block in each pool, or none, `needs`. Usually the free
    blocks suffice and the loop has no trips; otherwise it tries fewer and fewer
    requests, counting the blocks that they would release.
    """
    parts = parts_of(metadata)
    if not any(part.num_free(metadata) for part in parts):  # no pools
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

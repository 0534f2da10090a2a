"""fork: open sequences that share the tokens of existing ones.

Full blocks are shared through the block tables. Both owners would write a partly filled
last block, so it is copied at once: no writable block is shared, and `append` and
`write` need neither branch nor copy. (vLLM copies on write; the early copy keeps the
branch out of the step.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.blocks import sharing
from jkv.metadata import counters, requests, tables
from jkv.metadata.part import Done, Judged, Look, Moves, apply_plans, parts_of
from jkv.metadata.requests import Integers
from jkv.state import Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.status import Status


class Fork(NamedTuple):
    """Result of `fork`, one entry per request."""

    seq_ids: jax.Array  # i32[B], the children, -1 where refused or padding
    status: jax.Array  # i32[B], `Status`


@takes_cache()
def fork(
    cache: Cache, seq_ids: Integers, lengths: Integers | None = None
) -> tuple[Cache, Fork]:
    """Open sequences that share the tokens of existing ones.

    A child has its parent's tokens but not its reserved blocks. It takes one block if
    its last block is partly filled, none otherwise. Outside jit the host checks if a
    block must be copied, and then copies the whole storage: jit and donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int, the parents; one may appear many times, -1 is padding.
      lengths: i32[B] or int, number of the parent's tokens in each child, 0 to the
        parent's context length; None is all. With a sliding window the window of the
        next row must be in the cache, and recurrent-state layers need a state at this
        length, as for `truncate`.

    Returns:
      The new cache and a `Fork`. Status: OK, INVALID_SEQUENCE, INVALID_ARGUMENT (a
      length below 0, above the parent's or below its window), OUT_OF_SEQUENCES or
      OUT_OF_BLOCKS.

    Raises:
      ValueError: if an argument is not integral, has more than one axis, or differs in
        length.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=4, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, _ = jkv.append(cache, [0], [6], capacity=6)
      >>> cache, forked = jkv.fork(cache, [0, 0])
      >>> forked.seq_ids.tolist()
      [1, 2]
      >>> [jkv.block_ids(cache, i)[:2].tolist() for i in range(3)]
      [[0, 1], [0, 2], [0, 3]]
    """
    if lengths is None:
        (parents,) = requests.broadcast(seq_ids=seq_ids)
        kept = None
    else:
        parents, kept = requests.broadcast(seq_ids=seq_ids, lengths=lengths)
    metadata, result, moves = _fork(cache.metadata, parents, kept)
    return cache.follow(metadata, moves), result


@jax.jit
def _fork(
    metadata: Metadata, parents: jax.Array, lengths: jax.Array | None
) -> tuple[Metadata, Fork, tuple[Moves, ...]]:
    length = sharing.find_lengths(metadata, parents, lengths)
    looks = [part.share(metadata, parents, length) for part in parts_of(metadata)]
    wrong = jnp.zeros(parents.shape, bool)
    if lengths is not None:
        wrongs = [mask for look in looks for mask in look.wrongs]
        # Lengths outside the parent's were clipped, and differ.
        wrong = requests.any_of([length.tokens != lengths, *wrongs])
    status, served, plans = _judge(metadata, looks, parents, wrong)
    metadata, children = tables.open_rows(metadata, served, length.tokens)
    done = Done(served, children)
    metadata, moves = apply_plans(metadata, plans, done)
    row = done.rows(metadata)
    metadata = metadata.index.inherit(metadata, row, parents, length.tokens)
    parent = jnp.where(served, parents, metadata.max_sequences)
    metadata = counters.mark_parents(metadata, parent)
    metadata = counters.settle(metadata, status, served)
    return metadata, Fork(children, status), moves


def _judge(
    metadata: Metadata, looks: list[Look], parents: jax.Array, wrong: jax.Array
) -> tuple[jax.Array, jax.Array, list[Judged]]:
    """Return statuses, i32[B], a mask of served requests, bool[B], and plans."""
    padding = requests.is_padding(parents)
    live = requests.is_live(metadata, parents)
    eligible = live & ~wrong & ~padding
    plans = [look.judge(eligible) for look in looks]
    no_block = requests.agree([plan.lacks for plan in plans]).no_block
    status = requests.find_status(
        padding,
        [
            (Status.INVALID_SEQUENCE, ~live),
            (Status.INVALID_ARGUMENT, wrong),
            (Status.OUT_OF_SEQUENCES, tables.lacks_row(metadata, eligible, no_block)),
            (Status.OUT_OF_BLOCKS, no_block),
        ],
    )
    return status, eligible & (status == Status.OK), plans

"""fork: new sequences that share the past of existing ones.

Full blocks are shared by naming them in two table rows. A partly filled tail would be
written by both owners, so it is copied at once: after that no block which may be
written has a second owner, and `append` and `write` need neither branch nor copy. (vLLM
delays this copy until a write, as copy-on-write; copying early keeps the branch out of
the step.)
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
    """What `fork` answers, one entry per request."""

    seq_ids: jax.Array  # i32[B], the children, -1 where refused or padding
    status: jax.Array  # i32[B], `Status`


@takes_cache()
def fork(
    cache: Cache, seq_ids: Integers, lengths: Integers | None = None
) -> tuple[Cache, Fork]:
    """Open new sequences that share the past of existing ones.

    A child has its parent's tokens but not its reserved blocks. It costs one block if
    its last block is partly filled, none otherwise. Outside jit the host looks whether
    a block must be copied, and if so the storage is copied: jit and donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int, the parents; one may appear many times, -1 is padding.
      lengths: i32[B] or int, tokens that each child takes over, 0 to the parent's
        context length; None takes all. With a sliding window what the row after them
        sees must be kept, and layers with a state must have it there, as for
        `truncate`.

    Returns:
      The new cache and a `Fork`. Status: OK, INVALID_SEQUENCE, INVALID_ARGUMENT (a
      length below 0, above the parent's or below its window), OUT_OF_SEQUENCES or
      OUT_OF_BLOCKS.

    Raises:
      ValueError: for arguments that are no integers, have more than one axis, or differ
        in length.

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
        # A length that the parent does not have was clipped, and differs.
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
    """Return each request's status, i32[B], which are served, bool[B], and plans."""
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

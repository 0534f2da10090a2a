"""The prefix index: which full blocks hold the keys and values of a prompt's beginning.

What a block holds depends on its tokens and on all tokens before it. The index is a
hash table over both: the hash of a prefix is a sum over its blocks, so that all hashes
of a prompt come from one running sum and all look-ups happen at once. (vLLM chains
block hashes the same way, one after another on the host; SGLang keeps a radix tree.)

A hash only proposes. A hit is confirmed by the block's tokens, its domain, and by its
parent being the hit of the column before, back to the first. A parent cannot be
recycled before its children, so a block id names the same contents all the while.

The index knows the blocks of the leading group of layers. A block of another group is
found *beside* one of those: the leader's block names its partner, and the partner the
block that it stands beside. Each side is forgotten where its block is handed out, so
what both agree on holds the same tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.indexing import gather, scatter
from jkv.metadata.xla_cpu import stage, written_after
from jkv.prefixes.arrays import Beside, IndexArrays
from jkv.sharding.loops import when
from jkv.state import Metadata


def index_of(metadata: Metadata) -> IndexArrays:
    """Return the index, or say how to get one."""
    if not isinstance(metadata.index, IndexArrays):
        raise ValueError(
            "this cache has no prefix index; configure it with prefix_caching=True, in "
            "its CacheConfig or, with groups of layers, in its GroupedConfig"
        )
    return metadata.index


def put_index(metadata: Metadata, index: IndexArrays) -> Metadata:
    return dataclasses.replace(metadata, index=index)


def with_index(metadata: Metadata, **changes: object) -> Metadata:
    index = dataclasses.replace(index_of(metadata), **changes)  # type: ignore[arg-type]
    return put_index(metadata, index)


def with_follower(metadata: Metadata, number: int, **changes: jax.Array) -> Metadata:
    """Return the metadata with another account of one group's blocks."""
    followers = list(index_of(metadata).followers)
    at = metadata.followers.index(number)
    followers[at] = dataclasses.replace(followers[at], **changes)
    return with_index(metadata, followers=tuple(followers))


def beside_of(metadata: Metadata, number: int) -> Beside:
    """Return which blocks of a group stood beside those of the leading group."""
    return index_of(metadata).followers[metadata.followers.index(number)]


def set_partners(
    metadata: Metadata, number: int, leaders: jax.Array, blocks: jax.Array
) -> Metadata:
    """Let blocks of a group stand beside the leader's; N and N_0 are dropped."""
    beside = beside_of(metadata, number)
    return with_follower(
        metadata,
        number,
        partners=scatter(beside.partners, leaders, blocks),
        beside=scatter(beside.beside, blocks, leaders),
    )


def forget_partners(metadata: Metadata, number: int, leaders: jax.Array) -> Metadata:
    """Forget partners of an earlier text of the leader's blocks that just entered."""
    nothing = metadata.groups[number].num_blocks
    partners = beside_of(metadata, number).partners
    partners = scatter(partners, leaders, nothing)
    return with_follower(metadata, number, partners=partners)


def tokens_of(metadata: Metadata) -> jax.Array:
    """Return the recorded tokens, i32[N, T] of the leading group."""
    assert metadata.tokens is not None, "an index comes with recorded tokens"
    return metadata.tokens


def is_indexed(metadata: Metadata, block: jax.Array) -> jax.Array:
    """Return whether the leader's blocks, i32[...], are in the index, bool[...]."""
    hashes = index_of(metadata).hashes
    return gather(hashes, block, fill=0) != 0


def find_partners(metadata: Metadata, number: int, block: jax.Array) -> jax.Array:
    """Return a group's block beside each of the leader's, i32[...]; N where none is."""
    if number == metadata.leader:
        return block
    nothing = metadata.groups[number].num_blocks
    return _agree(beside_of(metadata, number), block, nothing=nothing)


# A stage: as part of a later fusion this would be read again after it was changed.
@stage
def _agree(beside: Beside, block: jax.Array, *, nothing: int) -> jax.Array:
    """Return the partners of the leader's blocks that stand beside them."""
    partner = gather(beside.partners, block, fill=nothing)
    agrees = gather(beside.beside, partner, fill=-1) == block
    return jnp.where(agrees, partner, nothing)


def is_known(metadata: Metadata, number: int, block: jax.Array) -> jax.Array:
    """Return whether blocks of a group, i32[...], can be found, bool[...]."""
    if number == metadata.leader:
        return is_indexed(metadata, block)
    above = _find_above(metadata, number, block)
    partners = beside_of(metadata, number).partners
    partner = gather(partners, above, fill=-1)
    return (partner == block) & is_indexed(metadata, above)


def _find_above(metadata: Metadata, number: int, block: jax.Array) -> jax.Array:
    """Return which of the leader's blocks those of another group stand beside."""
    above, nothing = beside_of(metadata, number).beside, metadata.leading.num_blocks
    return gather(above, block, fill=nothing)


def forget_blocks(metadata: Metadata, number: int, block: jax.Array) -> Metadata:
    """Take blocks of a group, i32[P], out of the index; N is dropped."""
    if number == metadata.leader:
        hashes = scatter(index_of(metadata).hashes, block, jnp.uint32(0))
        return with_index(metadata, hashes=hashes)
    beside, nothing = beside_of(metadata, number), metadata.leading.num_blocks
    above = scatter(beside.beside, block, nothing)
    return with_follower(metadata, number, beside=above)


def forget_taken(
    metadata: Metadata, number: int, block: jax.Array
) -> tuple[Metadata, jax.Array]:
    """Forget blocks of a group that are handed out, i32[P]; count those known."""
    was_known = is_known(metadata, number, block)
    was_read = was_known
    if number != metadata.leader:
        # Always true, and made from what is read: blocks are forgotten known or not.
        above = _find_above(metadata, number, block)
        was_read = above <= metadata.leading.num_blocks
    gone = written_after(was_read, block, metadata.groups[number].num_blocks)
    metadata = forget_blocks(metadata, number, gone)
    return metadata, jnp.sum(was_known, dtype=jnp.int32)


def forget_rewritten(metadata: Metadata, number: int, block: jax.Array) -> Metadata:
    """Forget blocks that are written again, and what follows those of the leader."""
    if number != metadata.leader:
        return forget_blocks(metadata, number, block)
    # What was found by way of a block leaves the index with it: the blocks that its
    # sequence has after it, and cached ones.
    index, nothing = index_of(metadata), metadata.leading.num_blocks
    indexed = jnp.where(is_indexed(metadata, block), block, nothing)

    def forget_all(hashes: jax.Array) -> jax.Array:
        gone = scatter(jnp.zeros((nothing,), bool), indexed, True)
        above = jnp.where(hashes != 0, index.parents, nothing)

        # A trip asks whether the ancestor 1, 2, 4, ... blocks before is gone: few trips
        # for the longest chain. A loop of XLA would copy what it reads and writes.
        for _ in range(metadata.max_blocks_per_sequence.bit_length()):
            gone |= gather(gone, above, fill=False)
            above = gather(above, above, fill=nothing)
        block = jnp.where(gone, jnp.arange(nothing, dtype=jnp.int32), nothing)
        return scatter(hashes, block, jnp.uint32(0))

    # A pass over the pool, so only where there is something to forget.
    hashes = when(jnp.any(indexed < nothing), forget_all, index.hashes)
    return with_index(metadata, hashes=hashes)

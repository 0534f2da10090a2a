"""The prefix index: full blocks with the keys and values of prompt prefixes.

The contents of a block depend on its tokens and all tokens before it. The index is a
hash table over both: the hash of a prefix is a sum over its blocks, so one running sum
gives all hashes of a prompt, and all look-ups happen at once. (vLLM chains block hashes
one after another on the host; SGLang keeps a radix tree.)

A hash is only a candidate. A hit is confirmed by the block's tokens, its cache salt,
and its parent, which must be the hit of the preceding column, back to the first. A
parent is not recycled before its children, so a block id keeps its meaning.

The index covers the blocks of the leading group of layers. A block of another group is
found through its pair: the leader's block stores its partner, and the partner the
leader's block. Each side is cleared when its block is evicted, so two sides that agree
hold the same tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.operations import gather, scatter, stage, when, written_after
from jkv.prefixes.arrays import IndexArrays, PairedBlocks
from jkv.state import Metadata


def index_of(metadata: Metadata) -> IndexArrays:
    """Return the prefix index; raise without one."""
    if not isinstance(metadata.index, IndexArrays):
        raise ValueError(
            "this cache has no prefix index; create it with prefix_caching=True in its "
            "CacheConfig or, with groups of layers, in its GroupedConfig"
        )
    return metadata.index


def put_index(metadata: Metadata, index: IndexArrays) -> Metadata:
    return dataclasses.replace(metadata, index=index)


def with_index(metadata: Metadata, **changes: object) -> Metadata:
    index = dataclasses.replace(index_of(metadata), **changes)  # type: ignore[arg-type]
    return put_index(metadata, index)


def with_follower(metadata: Metadata, number: int, **changes: jax.Array) -> Metadata:
    """Return the metadata with other pairs of one group's blocks."""
    followers = list(index_of(metadata).followers)
    at = metadata.followers.index(number)
    followers[at] = dataclasses.replace(followers[at], **changes)
    return with_index(metadata, followers=tuple(followers))


def pairs_of(metadata: Metadata, number: int) -> PairedBlocks:
    """Return the pairs of a group's blocks and the leader's."""
    return index_of(metadata).followers[metadata.followers.index(number)]


def set_partners(
    metadata: Metadata, number: int, leaders: jax.Array, blocks: jax.Array
) -> Metadata:
    """Pair blocks of a group with the leader's; N and N_0 are dropped."""
    beside = pairs_of(metadata, number)
    return with_follower(
        metadata,
        number,
        partners=scatter(beside.partners, leaders, blocks),
        beside=scatter(beside.beside, blocks, leaders),
    )


def forget_partners(metadata: Metadata, number: int, leaders: jax.Array) -> Metadata:
    """Clear stale partners of leader blocks that just entered the index."""
    nothing = metadata.groups[number].num_blocks
    partners = pairs_of(metadata, number).partners
    partners = scatter(partners, leaders, nothing)
    return with_follower(metadata, number, partners=partners)


def tokens_of(metadata: Metadata) -> jax.Array:
    """Return the recorded tokens of the leading group, i32[N, T]."""
    assert metadata.tokens is not None, "an index comes with recorded tokens"
    return metadata.tokens


def is_indexed(metadata: Metadata, block: jax.Array) -> jax.Array:
    """Return True where the leader's blocks, i32[...], are indexed."""
    hashes = index_of(metadata).hashes
    return gather(hashes, block, fill=0) != 0


def find_partners(metadata: Metadata, number: int, block: jax.Array) -> jax.Array:
    """Return the partner of each leader block in a group, i32[...]; N for none."""
    if number == metadata.leader:
        return block
    nothing = metadata.groups[number].num_blocks
    return _agree(pairs_of(metadata, number), block, nothing=nothing)


# A stage: a later fusion would read the array again, after its update.
@stage
def _agree(beside: PairedBlocks, block: jax.Array, *, nothing: int) -> jax.Array:
    """Return the partners of the leader's blocks with valid pairs."""
    partner = gather(beside.partners, block, fill=nothing)
    agrees = gather(beside.beside, partner, fill=-1) == block
    return jnp.where(agrees, partner, nothing)


def is_known(metadata: Metadata, number: int, block: jax.Array) -> jax.Array:
    """Return True where blocks of a group, i32[...], can be found."""
    if number == metadata.leader:
        return is_indexed(metadata, block)
    above = _find_above(metadata, number, block)
    partners = pairs_of(metadata, number).partners
    partner = gather(partners, above, fill=-1)
    return (partner == block) & is_indexed(metadata, above)


def _find_above(metadata: Metadata, number: int, block: jax.Array) -> jax.Array:
    """Return the leader block paired with each block of another group."""
    above, nothing = pairs_of(metadata, number).beside, metadata.leading.num_blocks
    return gather(above, block, fill=nothing)


def forget_blocks(metadata: Metadata, number: int, block: jax.Array) -> Metadata:
    """Remove blocks of a group, i32[P], from the index; N is dropped."""
    if number == metadata.leader:
        hashes = scatter(index_of(metadata).hashes, block, jnp.uint32(0))
        return with_index(metadata, hashes=hashes)
    beside, nothing = pairs_of(metadata, number), metadata.leading.num_blocks
    above = scatter(beside.beside, block, nothing)
    return with_follower(metadata, number, beside=above)


def forget_taken(
    metadata: Metadata, number: int, block: jax.Array
) -> tuple[Metadata, jax.Array]:
    """Remove allocated blocks of a group, i32[P]; return the number evicted."""
    was_known = is_known(metadata, number, block)
    was_read = was_known
    if number != metadata.leader:
        # Always true; the condition makes the write depend on the read.
        above = _find_above(metadata, number, block)
        was_read = above <= metadata.leading.num_blocks
    gone = written_after(was_read, block, metadata.groups[number].num_blocks)
    metadata = forget_blocks(metadata, number, gone)
    return metadata, jnp.sum(was_known, dtype=jnp.int32)


def forget_rewritten(metadata: Metadata, number: int, block: jax.Array) -> Metadata:
    """Remove blocks before they are overwritten, and descendants of the leader's."""
    if number != metadata.leader:
        return forget_blocks(metadata, number, block)
    # All descendants were found through a block and leave with it: later blocks of its
    # sequence, and cached ones.
    index, nothing = index_of(metadata), metadata.leading.num_blocks
    indexed = jnp.where(is_indexed(metadata, block), block, nothing)

    def forget_all(hashes: jax.Array) -> jax.Array:
        gone = scatter(jnp.zeros((nothing,), bool), indexed, True)
        above = jnp.where(hashes != 0, index.parents, nothing)

        # Each trip checks the ancestor 1, 2, 4, ... blocks before: few trips for the
        # longest chain. An XLA loop would copy the arrays that it reads and writes.
        for _ in range(metadata.max_blocks_per_sequence.bit_length()):
            gone |= gather(gone, above, fill=False)
            above = gather(above, above, fill=nothing)
        block = jnp.where(gone, jnp.arange(nothing, dtype=jnp.int32), nothing)
        return scatter(hashes, block, jnp.uint32(0))

    # A pass over the pool, only if there is a block to remove.
    hashes = when(jnp.any(indexed < nothing), forget_all, index.hashes)
    return with_index(metadata, hashes=hashes)

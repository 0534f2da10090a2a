"""Snapshots: copies of states, for prefix cache hits in recurrent-state layers.

A state cannot be truncated: a prompt continues from a length at which its state was
copied. `commit` copies the state of each sequence at multiples of `snapshot_every`.
Each distinct prefix has one snapshot with a copy of its tokens, so an eviction affects
no other one. The least recently used snapshot is evicted first.

Copies at divergence points are from Marconi (https://arxiv.org/abs/2411.19379):
`find_common` returns the divergence point of a prompt.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jkv.operations import for_each_of, gather, scatter, scatter_max, while_loop
from jkv.prefixes import hashing
from jkv.prefixes.arrays import Snapshots
from jkv.prefixes.prefix_index import index_of, with_index
from jkv.state import Batch, Metadata
from jkv.state.index import FoundState


def snapshots_of(metadata: Metadata) -> Snapshots | None:
    """Return the snapshots, or None without recurrent-state layers."""
    return index_of(metadata).snapshots


def with_snapshots(metadata: Metadata, **changes: object) -> Metadata:
    snapshots = snapshots_of(metadata)
    assert snapshots is not None
    snapshots = dataclasses.replace(snapshots, **changes)  # type: ignore[arg-type]
    return with_index(metadata, snapshots=snapshots)


def find_longest(
    metadata: Metadata,
    snapshots: Snapshots,
    tokens: jax.Array,  # i32[B, P], prompts
    salts: jax.Array,  # i32[B]
    hashes: jax.Array,  # u32[B, C], up to each column's end
    goes_on: jax.Array,  # bool[B, C], True if groups with blocks can continue there
) -> tuple[jax.Array, jax.Array]:  # i32[B], columns before it, 0 for none; its id
    """Find the longest snapshot of each prompt after which all groups can continue."""
    none, num_columns = snapshots.lengths.shape[0], hashes.shape[1]
    if num_columns == 0:
        shape = salts.shape
        return jnp.zeros(shape, jnp.int32), jnp.full(shape, none, jnp.int32)
    column = snapshots.lengths // metadata.block_size - 1
    within = (column >= 0) & (column < num_columns)
    column = jnp.clip(column, 0, num_columns - 1)
    proposed = (
        within[None]
        & goes_on[:, column]
        & (hashes[:, column] == snapshots.hashes[None])
        & (salts[:, None] == snapshots.salts[None])
    )
    width = tokens.shape[1]
    position = jnp.arange(width, dtype=jnp.int32)[None]

    def choose(proposed: jax.Array) -> tuple[jax.Array, jax.Array]:
        lengths = jnp.where(proposed, snapshots.lengths[None], 0)
        best = jnp.argmax(lengths, axis=1).astype(jnp.int32)
        return jnp.max(lengths, axis=1), best

    def is_wrong(proposed: jax.Array) -> jax.Array:
        length, best = choose(proposed)
        theirs = gather(snapshots.tokens[:, :width], best)
        theirs = jnp.pad(theirs, ((0, 0), (0, width - theirs.shape[1])))
        return jnp.any((theirs != tokens) & (position < length[:, None]), axis=1)

    def without_wrong(
        state: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        proposed, wrong = state
        _, best = choose(proposed)
        snapshot_ids = jnp.arange(none, dtype=jnp.int32)[None]
        proposed &= ~(wrong[:, None] & (snapshot_ids == best[:, None]))
        return proposed, is_wrong(proposed)

    # More trips only if two sequences have one hash.
    proposed, _ = while_loop(
        lambda state: jnp.any(state[1]), without_wrong, (proposed, is_wrong(proposed))
    )
    length, best = choose(proposed)
    return length // metadata.block_size, jnp.where(length > 0, best, none)


def find_common(metadata: Metadata, tokens: jax.Array, salts: jax.Array) -> jax.Array:
    """Return the divergence point of prompts, i32[B, P], from snapshots' tokens."""
    snapshots = snapshots_of(metadata)
    assert snapshots is not None
    width = min(tokens.shape[1], snapshots.tokens.shape[1])
    stored, prompts = snapshots.tokens[:, :width], tokens[:, :width]
    position = jnp.arange(width, dtype=jnp.int32)[None]

    # One prompt at a time, to bound the memory of the comparison.
    def compare(request: jax.Array, common: jax.Array) -> jax.Array:
        differs = stored != gather(prompts, request)
        differs |= position >= snapshots.lengths[:, None]
        end = jnp.min(jnp.where(differs, position, width), axis=1, initial=width)
        end = jnp.where(snapshots.salts == gather(salts, request), end, 0)
        return common.at[request].set(jnp.max(end)[None])

    common = jnp.zeros(salts.shape, jnp.int32)
    return for_each_of(prompts[:, 0] >= 0, compare, common)


def state_at(snapshots: Snapshots, snapshot_id: jax.Array) -> FoundState:
    """Return snapshots by id, i32[B], P for none."""
    pending = gather(snapshots.num_pending, snapshot_id, fill=0)
    return FoundState(snapshot_id, pending, snapshots.lengths.shape[0])


def find_at(
    metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
) -> FoundState | None:
    """Return snapshots of sequences' own tokens at lengths above 0, i32[B]."""
    snapshots = snapshots_of(metadata)
    if snapshots is None:
        return None
    known, none = snapshots.sequence_tokens, snapshots.lengths.shape[0]
    salts = index_of(metadata).read(seq_ids).salt

    def look(request: jax.Array, snapshot_ids: jax.Array) -> jax.Array:
        tokens = gather(known, gather(seq_ids, request))
        snapshot_id, _ = _find_snapshot(
            snapshots, tokens[0], gather(lengths, request), gather(salts, request)
        )
        return snapshot_ids.at[request].set(snapshot_id)

    snapshot_ids = jnp.full(seq_ids.shape, none, jnp.int32)
    return state_at(snapshots, for_each_of(lengths > 0, look, snapshot_ids))


def _find_snapshot(
    snapshots: Snapshots, tokens: jax.Array, length: jax.Array, salt: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the id of a sequence's snapshot, or P, and if its tokens are recorded."""
    counts = jnp.arange(tokens.shape[0], dtype=jnp.int32) < length
    is_known = jnp.all((tokens >= 0) | ~counts)
    alike = jnp.all((snapshots.tokens == tokens[None]) | ~counts[None], axis=1)
    alike &= (snapshots.lengths == length) & (snapshots.salts == salt) & is_known
    snapshot_id = jnp.argmax(alike).astype(jnp.int32)
    none = snapshots.lengths.shape[0]
    return jnp.where(jnp.any(alike), snapshot_id, none)[None], is_known


def mark_used(metadata: Metadata, found: FoundState | None) -> Metadata:
    """Mark snapshots as used, in request order."""
    snapshots = snapshots_of(metadata)
    if snapshots is None or found is None:
        return metadata
    snapshot_id, is_used = found.snapshot_id, found.snapshot_id < found.none
    rank = jnp.cumsum(is_used.astype(jnp.uint32), dtype=jnp.uint32)
    stamps = snapshots.num_uses + rank
    return with_snapshots(
        metadata,
        last_used=scatter_max(snapshots.last_used, snapshot_id, stamps),
        num_uses=snapshots.num_uses + jnp.sum(is_used, dtype=jnp.uint32),
    )


def make(
    metadata: Metadata, batch: Batch, continues: jax.Array
) -> tuple[Metadata, jax.Array]:
    """Choose snapshots for sequences that a step left at a multiple.

    Only continuing requests, bool[B], with all their tokens committed get one. Return
    the metadata and the ids to copy their rows to, i32[B], P for none. Of several
    requests with one id the last has it.
    """
    snapshots = snapshots_of(metadata)
    assert snapshots is not None
    length, seq_ids = batch.context_lengths, batch.seq_ids
    is_now = gather(metadata.context_lengths, seq_ids) == length
    committed = index_of(metadata).read(seq_ids).committed
    is_due = (
        continues & is_now & (committed == length) & (length % snapshots.every == 0)
    )
    none = snapshots.lengths.shape[0]
    snapshot_ids = jnp.full(seq_ids.shape, none, jnp.int32)
    made = for_each_of(
        is_due,
        lambda request, carry: _make_one(metadata, batch, request, *carry),
        (snapshots, snapshot_ids),
    )
    return with_index(metadata, snapshots=made[0]), made[1]


def _make_one(
    metadata: Metadata,
    batch: Batch,
    request: jax.Array,
    snapshots: Snapshots,
    snapshot_ids: jax.Array,
) -> tuple[Snapshots, jax.Array]:
    """Find the snapshot of one request's tokens, i32[1], or evict one for it."""
    seq_id, length = (
        gather(batch.seq_ids, request),
        gather(batch.context_lengths, request),
    )
    tokens = gather(snapshots.sequence_tokens, seq_id)[0]
    salt = index_of(metadata).read(seq_id).salt
    snapshot_id, is_known = _find_snapshot(snapshots, tokens, length, salt)
    none = snapshots.lengths.shape[0]
    is_new = (snapshot_id == none) & is_known
    oldest = jnp.argmin(snapshots.last_used).astype(jnp.int32)[None]
    target = jnp.where(is_new, oldest, none)
    used = jnp.where(is_new, oldest, snapshot_id)
    stamp = snapshots.num_uses + is_known.astype(jnp.uint32)

    snapshots = put_at(
        snapshots,
        target,
        lengths=length,
        salts=salt,
        hashes=hash_tokens(tokens, salt, length, metadata.block_size),
        num_pending=metadata.sequences.pending_of(seq_id),
        tokens=tokens[None],
    )
    snapshots = put_at(snapshots, used, last_used=stamp)
    snapshots = dataclasses.replace(snapshots, num_uses=stamp)
    return snapshots, snapshot_ids.at[request].set(target)


def put_at(
    snapshots: Snapshots, snapshot_ids: jax.Array, **values: jax.Array
) -> Snapshots:
    """Return snapshots with other values for ids, i32[W]; P is dropped."""
    changed: dict[str, Any] = {
        name: scatter(getattr(snapshots, name), snapshot_ids, value)
        for name, value in values.items()
    }
    return dataclasses.replace(snapshots, **changed)


def hash_tokens(
    tokens: jax.Array, salt: jax.Array, length: jax.Array, block_size: int
) -> jax.Array:
    """Return the hash of the whole blocks of a sequence, as in the index, u32[1]."""
    columns = jnp.pad(tokens, (0, -tokens.shape[0] % block_size)).reshape(
        -1, block_size
    )
    column = jnp.arange(columns.shape[0], dtype=jnp.int32)
    terms = hashing.column_hash(columns, column)
    terms = jnp.where(column < length // block_size, terms, jnp.uint32(0))
    return hashing.salt_hash(salt) + jnp.sum(terms, dtype=jnp.uint32)


def forget_snapshots(
    metadata: Metadata, find_gone: Callable[[Snapshots], jax.Array | bool]
) -> Metadata:
    """Remove the snapshots for which `find_gone` is true, bool[P], if there are any."""
    snapshots = snapshots_of(metadata)
    if snapshots is None:
        return metadata
    gone = find_gone(snapshots)
    return with_snapshots(
        metadata,
        lengths=jnp.where(gone, 0, snapshots.lengths),
        last_used=jnp.where(gone, jnp.uint32(0), snapshots.last_used),
    )


def are_oldest(snapshots: Snapshots, count: jax.Array) -> jax.Array:
    """Return True for the `count` least recently used snapshots, bool[P]."""
    is_there = snapshots.lengths > 0
    older = snapshots.last_used[None] < snapshots.last_used[:, None]
    rank = jnp.sum(older & is_there[None], axis=1, dtype=jnp.int32)
    return is_there & (rank < count)

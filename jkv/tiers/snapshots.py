"""Copies of recurrent-state snapshots between device and host."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.prefixes.prefix_index import with_index
from jkv.prefixes.snapshots import hash_tokens, put_at, snapshots_of
from jkv.sharding.processes import bring
from jkv.state import Cache, Metadata
from jkv.tiers.spilled import list_snapshots


def fetch_snapshots(cache: Cache, snapshot_ids: list[int]) -> dict[str, np.ndarray]:
    """Copy snapshots to the host, [..., P, ...], by path in `Held`."""
    at = np.array(snapshot_ids, np.int32)
    known: Any = snapshots_of(cache.metadata)
    pending = np.asarray(known.num_pending)[None, at]
    fetched: dict[str, np.ndarray] = bring(_gather(list_snapshots(cache), at))
    return fetched | {"snapshot.num_pending": pending}


def put_snapshots(
    cache: Cache,
    held: list[dict[str, np.ndarray]],  # arrays of each snapshot, by path
    snapshot_ids: np.ndarray,  # i32[P], distinct
    *,
    donate: bool,
) -> Cache:
    """Write snapshots by their ids, in all groups with a recurrent state."""
    if not held:
        return cache
    old = list_snapshots(cache)
    given = {path: np.stack([each[path] for each in held], 1) for path in old}
    new = (_put_donated if donate else _put)(old, given, snapshot_ids)
    storage = list(cache.storage)
    for number, group in enumerate(cache.metadata.state_numbers):
        parts = {
            f"snapshot_{part}": {
                name: new[f"snapshot.{part}.{number}.{name}"]
                for name in getattr(storage[group], f"snapshot_{part}")
            }
            for part in ("rows", "inputs")
        }
        storage[group] = dataclasses.replace(storage[group], **parts)
    return cache.with_storage(tuple(storage))


@jax.jit
def _gather(
    arrays: dict[str, jax.Array], snapshot_ids: jax.Array
) -> dict[str, jax.Array]:
    return jax.tree.map(
        lambda array: array.at[:, snapshot_ids].get(mode="clip"), arrays
    )


def _scatter(
    arrays: dict[str, jax.Array], given: dict[str, jax.Array], snapshot_ids: jax.Array
) -> dict[str, jax.Array]:
    return {
        path: array.at[:, snapshot_ids].set(given[path], unique_indices=True)
        for path, array in arrays.items()
    }


_put, _put_donated = jax.jit(_scatter), jax.jit(_scatter, donate_argnums=0)


def note_snapshots(
    metadata: Metadata,
    sequences: list[np.ndarray],
    salts: list[int],
    pending: np.ndarray,
) -> tuple[Metadata, np.ndarray]:
    """Replace empty or least recently used snapshots by those of sequences.

    `pending`, i32[P], is the number of pending tokens of each sequence, i32[n T]. A
    snapshot already stored keeps its id; all become the most recently used. Returns
    the metadata and the ids to write, i32[P], out of range for no write.
    """
    known: Any = snapshots_of(metadata)
    lengths, last_used, theirs, theirs_pending = map(
        np.array, (known.lengths, known.last_used, known.salts, known.num_pending)
    )
    none = len(lengths)
    own = np.full(len(sequences), none, np.int32)  # ids of snapshots already stored
    for number, (sequence, salt) in enumerate(zip(sequences, salts, strict=True)):
        alike = np.flatnonzero((lengths == len(sequence)) & (theirs == salt))
        for snapshot_id in alike.tolist():
            stored = np.asarray(known.tokens[snapshot_id])[: len(sequence)]
            if np.array_equal(stored, sequence):
                own[number] = snapshot_id
    free = sorted(
        {*range(none)} - {*own.tolist()}, key=lambda snapshot_id: last_used[snapshot_id]
    )
    snapshot_ids, is_new = own.copy(), own == none
    pending = np.where(is_new, pending, np.take(theirs_pending, own, mode="clip"))
    new = np.flatnonzero(is_new)
    new = new[max(len(new) - len(free), 0) :]  # the last are the longest
    snapshot_ids[new] = free[: len(new)]
    rows = np.full((len(sequences), known.tokens.shape[1]), -1, np.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    ends = np.array([len(sequence) for sequence in sequences], np.int32)
    metadata = _note(
        metadata, rows, ends, np.array(salts, np.int32), pending, snapshot_ids
    )
    return metadata, np.where(is_new, snapshot_ids, none)


@jax.jit
def _note(
    metadata: Metadata,
    sequences: jax.Array,
    lengths: jax.Array,
    salts: jax.Array,
    pending: jax.Array,
    snapshot_ids: jax.Array,
) -> Metadata:
    known: Any = snapshots_of(metadata)
    hash_one = functools.partial(hash_tokens, block_size=metadata.block_size)
    hashes = jax.vmap(hash_one)(sequences, salts[:, None], lengths[:, None])[:, 0]
    noted = put_at(
        known,
        snapshot_ids,
        lengths=lengths,
        salts=salts,
        hashes=hashes,
        num_pending=pending,
        tokens=sequences,
        last_used=known.num_uses + 1 + jnp.arange(len(sequences), dtype=jnp.uint32),
    )
    num_uses = known.num_uses + jnp.uint32(len(sequences))
    return with_index(metadata, snapshots=dataclasses.replace(noted, num_uses=num_uses))

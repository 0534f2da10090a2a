"""Copies of recurrent-state snapshots between device and host."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.prefixes.prefix_index import with_index
from jkv.prefixes.snapshots import hash_text, put_at, snapshots_of
from jkv.sharding.processes import bring
from jkv.state import Cache, Metadata
from jkv.tiers.spilled import list_snapshots


def fetch_snapshots(cache: Cache, places: list[int]) -> dict[str, np.ndarray]:
    """Copy the snapshots at `places` to the host, [..., P, ...], by path in `Held`."""
    at = np.array(places, np.int32)
    known: Any = snapshots_of(cache.metadata)
    pending = np.asarray(known.num_pending)[None, at]
    fetched: dict[str, np.ndarray] = bring(_gather(list_snapshots(cache), at))
    return fetched | {"snapshot.num_pending": pending}


def put_snapshots(
    cache: Cache,
    held: list[dict[str, np.ndarray]],  # arrays of each snapshot, by path
    places: np.ndarray,  # i32[P], distinct
    *,
    donate: bool,
) -> Cache:
    """Write snapshots to their places, in all groups with a recurrent state."""
    if not held:
        return cache
    old = list_snapshots(cache)
    given = {path: np.stack([each[path] for each in held], 1) for path in old}
    new = (_put_donated if donate else _put)(old, given, places)
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
def _gather(arrays: dict[str, jax.Array], places: jax.Array) -> dict[str, jax.Array]:
    return jax.tree.map(lambda array: array.at[:, places].get(mode="clip"), arrays)


def _scatter(
    arrays: dict[str, jax.Array], given: dict[str, jax.Array], places: jax.Array
) -> dict[str, jax.Array]:
    return {
        path: array.at[:, places].set(given[path], unique_indices=True)
        for path, array in arrays.items()
    }


_put, _put_donated = jax.jit(_scatter), jax.jit(_scatter, donate_argnums=0)


def note_snapshots(
    metadata: Metadata, texts: list[np.ndarray], salts: list[int], pending: np.ndarray
) -> tuple[Metadata, np.ndarray]:
    """Assign empty or least recently used places to the snapshots of sequences.

    `pending`, i32[P], is the number of pending tokens of each sequence, i32[n T]. A
    snapshot already stored keeps its place; all become the most recently used. Returns
    the metadata and the places to write, i32[P], out of range for no write.
    """
    known: Any = snapshots_of(metadata)
    lengths, last_used, theirs = map(
        np.array, (known.lengths, known.last_used, known.salts)
    )
    none = len(lengths)
    own = np.full(len(texts), none, np.int32)  # places of snapshots already stored
    for number, (text, salt) in enumerate(zip(texts, salts, strict=True)):
        alike = np.flatnonzero((lengths == len(text)) & (theirs == salt))
        for place in alike.tolist():
            if np.array_equal(known.texts[place][: len(text)], text):
                own[number] = place
    free = sorted({*range(none)} - {*own.tolist()}, key=lambda place: last_used[place])
    places, is_new = own.copy(), own == none
    pending = np.where(is_new, pending, np.take(known.num_pending, own, mode="clip"))
    new = np.flatnonzero(is_new)
    new = new[max(len(new) - len(free), 0) :]  # the last are the longest
    places[new] = free[: len(new)]
    rows = np.full((len(texts), known.texts.shape[1]), -1, np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    ends = np.array([len(text) for text in texts], np.int32)
    metadata = _note(metadata, rows, ends, np.array(salts, np.int32), pending, places)
    return metadata, np.where(is_new, places, none)


@jax.jit
def _note(
    metadata: Metadata,
    texts: jax.Array,
    lengths: jax.Array,
    salts: jax.Array,
    pending: jax.Array,
    places: jax.Array,
) -> Metadata:
    known: Any = snapshots_of(metadata)
    hash_one = functools.partial(hash_text, block_size=metadata.block_size)
    hashes = jax.vmap(hash_one)(texts, salts[:, None], lengths[:, None])[:, 0]
    noted = put_at(
        known,
        places,
        lengths=lengths,
        salts=salts,
        hashes=hashes,
        num_pending=pending,
        texts=texts,
        last_used=known.num_uses + 1 + jnp.arange(len(texts), dtype=jnp.uint32),
    )
    num_uses = known.num_uses + jnp.uint32(len(texts))
    return with_index(metadata, snapshots=dataclasses.replace(noted, num_uses=num_uses))

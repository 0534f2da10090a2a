"""Snapshots of states between their places and the host."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.prefixes.prefix_index import with_index
from jkv.prefixes.snapshots import hash_text, put_at, snapshots_of
from jkv.state import Cache, Metadata, StateStorage
from jkv.states.swapped import SwappedStates, fetch_states


def fetch_snapshots(cache: Cache, places: list[int]) -> dict[str, np.ndarray]:
    """Copy what places have to the host, [..., P, ...], by path in `Held`."""
    at = np.array(places, np.int32)
    known: Any = snapshots_of(cache.metadata)
    arrays = {"snapshot.num_pending": np.asarray(known.num_pending)[None, at]}
    for i, number in enumerate(_find_numbers(cache)):
        states = fetch_states(_by_place(cache.storage[number]), at)
        for part, own in (("rows", states.rows), ("inputs", states.inputs)):
            arrays |= {f"snapshot.{part}.{i}.{name}": own[name] for name in own}
    return arrays


def put_snapshots(
    cache: Cache,
    held: list[dict[str, np.ndarray]],  # arrays of snapshots, by path
    places: np.ndarray,  # i32[P], all different
    *,
    donate: bool,
) -> Cache:
    """Write snapshots of all groups with a state to places."""
    for at, number in enumerate(_find_numbers(cache)):
        old = cache.storage[number]
        if not old.num_layers or not held:
            continue
        by_place = _by_place(old)
        parts = {
            part: {
                name: np.stack(
                    [each[f"snapshot.{part}.{at}.{name}"] for each in held], 1
                )
                for name in getattr(by_place, part)
            }
            for part in ("rows", "inputs")
        }
        bases = np.zeros((old.num_layers, len(held)), np.int32)
        states = SwappedStates(bases=bases, **parts)
        cache = cache.with_group_storage(number, by_place)
        new = states.put(cache, number, places, None, donate=donate).storage[number]
        written = dataclasses.replace(
            old, snapshot_rows=new.rows, snapshot_inputs=new.inputs
        )
        cache = cache.with_group_storage(number, written)
    return cache


def _find_numbers(cache: Cache) -> list[int]:
    """Return the numbers of the groups with a state."""
    return [i for i, each in enumerate(cache.storage) if each.kind == "states"]


def _by_place(storage: StateStorage) -> StateStorage:
    """Return the snapshots as if they were rows; a snapshot stands at its own end."""
    num_places = max(
        (array.shape[1] for array in storage.snapshot_rows.values()), default=0
    )
    return dataclasses.replace(
        storage,
        bases=jnp.zeros((storage.num_layers, num_places), jnp.int32),
        rows=storage.snapshot_rows,
        inputs=storage.snapshot_inputs,
        snapshot_rows={},
        snapshot_inputs={},
    )


def note_snapshots(
    metadata: Metadata, texts: list[np.ndarray], salts: list[int], pending: np.ndarray
) -> tuple[Metadata, np.ndarray]:
    """Give places to the snapshots of texts: empty ones, and those unused for longest.

    Of texts, i32[n T] each, so many last tokens are pending, i32[P]. Returned with the
    metadata are the places, i32[P], that of no snapshot for a text that has one.
    """
    known: Any = snapshots_of(metadata)
    lengths, last_used, theirs = map(
        np.array, (known.lengths, known.last_used, known.salts)
    )
    none = len(lengths)
    places = np.full(len(texts), none, np.int32)
    for number, (text, salt) in enumerate(zip(texts, salts, strict=True)):
        alike = np.flatnonzero((lengths == len(text)) & (theirs == salt))
        if any(np.array_equal(known.texts[p][: len(text)], text) for p in alike):
            continue
        free = [p for p in range(none) if p not in places[:number]]
        if free:
            places[number] = min(free, key=lambda place: last_used[place])
    rows = np.full((len(texts), known.texts.shape[1]), -1, np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    ends = np.array([len(text) for text in texts], np.int32)
    return _note(
        metadata, rows, ends, np.array(salts, np.int32), pending, places
    ), places


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

"""check: every wrong entry of the metadata is detected."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_caches import (
    allocate,
    append,
    fork,
    free,
    opened,
    small_cache,
    with_metadata,
    write_tokens,
)

import jkv

pytestmark = pytest.mark.one_end


def shared():
    """Return sequence 1 of two full blocks and its fork 2; sequence 0 was freed."""
    cache, _ = fork(opened(6, 8), 1)
    cache, _ = free(cache, 0)
    jkv.check(cache)
    return cache


def changed(array, index, value):
    """Return a copy of an array with one changed entry."""
    copy = np.array(array)
    copy[index] = value
    return copy


def find_array(cache, name, group=0):
    """Return an array of the sequences or of a group by its name."""
    parts = cache.metadata.sequences, cache.metadata.groups[group]
    return next(getattr(part, name) for part in parts if hasattr(part, name))


def wrong_values(array):
    """Yield each entry of an array with values that must be detected."""
    flat = np.asarray(array).reshape(-1)
    for index in range(flat.size):
        if flat.dtype == np.bool_:
            values = [not flat[index]]
        else:
            values = [flat[index] + 1, flat[index] - 1, -7, 2**30]
        for value in values:
            if value != flat[index]:
                yield index, value, changed(flat, index, value).reshape(array.shape)


@pytest.mark.parametrize("name", ["num_mapped_blocks", "is_open", "reference_counts"])
def test_any_wrong_entry_is_detected(name):
    cache = shared()
    for index, value, array in wrong_values(find_array(cache, name)):
        with pytest.raises(jkv.InvariantError):
            jkv.check(with_metadata(cache, **{name: array}))
            pytest.fail(f"{name}[{index}] = {value} was not noticed")


@pytest.mark.parametrize("name", ["free_blocks", "free_rows"])
def test_any_wrong_number_of_a_ring_is_detected(name):
    cache = shared()
    ring = find_array(cache, name)
    for index, value, array in wrong_values(ring.bounds):
        if index == 0:
            continue  # another head may select the same ids
        if index == 3 and 0 <= value <= int(ring.count):
            continue  # the ring may have been that short once
        if index > 3:
            continue  # a block outside the ring cannot be counted again
        wrong = dataclasses.replace(ring, bounds=jnp.asarray(array))
        with pytest.raises(jkv.InvariantError):
            jkv.check(with_metadata(cache, **{name: wrong}))
            pytest.fail(f"{name}.bounds[{index}] = {value} was not noticed")


@pytest.mark.parametrize(
    "name, index, value",
    [
        ("block_tables", (1, 0), 7),  # a free block
        ("block_tables", (1, 1), 2),  # mapped twice
        ("block_tables", (1, 0), 8),  # not mapped
        ("block_tables", (1, 0), -1),
        ("context_lengths", 1, 9),  # without a block for it
        ("context_lengths", 1, -1),
        ("context_lengths", 0, 1),  # closed, but not empty
        ("context_lengths", 1, 7),  # a shared tail
    ],
)
def test_live_entries_of_tables_and_lengths(name, index, value):
    """Entries past the end have no meaning."""
    cache = shared()
    wrong = changed(find_array(cache, name), index, value)
    with pytest.raises(jkv.InvariantError):
        jkv.check(with_metadata(cache, **{name: wrong}))


def test_rings_contain_each_id_once():
    cache = shared()
    free_blocks, rows = (find_array(cache, n) for n in ("free_blocks", "free_rows"))
    head = int(free_blocks.head)
    twice = int(free_blocks.ids[(head + 1) % 8])
    for name, ring, ids in (
        ("free_blocks", free_blocks, changed(free_blocks.ids, head, twice)),
        ("free_blocks", free_blocks, changed(free_blocks.ids, head, 2)),  # in use
        ("free_rows", rows, np.zeros_like(rows.ids)),
    ):
        ring = dataclasses.replace(ring, ids=jnp.asarray(ids))
        with pytest.raises(jkv.InvariantError):
            jkv.check(with_metadata(cache, **{name: ring}))


def reusable():
    """Return two cached blocks, parent and child; the child is evicted first."""
    cache, _ = allocate(small_cache(prefix_caching=True), 0)
    cache, step = append(cache, 0, 9, tokens=range(9))
    cache, _ = free(write_tokens(cache, step, range(9)), 0)
    jkv.check(cache)
    ((parent, child),) = [
        (int(parent), block)
        for block, parent in enumerate(cache.metadata.index.parents)
        if parent < 8 and cache.metadata.index.hashes[block]
    ]
    return cache, parent, child


def test_an_indexed_block_has_the_salt_of_its_parent():
    cache, _, child = reusable()
    index = cache.metadata.index
    wrong = dataclasses.replace(index, salts=changed(index.salts, child, 1))
    with pytest.raises(jkv.InvariantError, match="different cache salts"):
        jkv.check(with_metadata(cache, index=wrong))


def test_a_cached_block_is_evicted_before_its_parent():
    cache, parent, child = reusable()
    ring = find_array(cache, "free_blocks")
    ids, places = np.array(ring.ids), np.array(ring.indices)
    spots = places[[parent, child]]
    ids[spots], places[[parent, child]] = [child, parent], spots[::-1]
    ring = dataclasses.replace(ring, ids=jnp.asarray(ids), indices=jnp.asarray(places))
    with pytest.raises(jkv.InvariantError, match="outlives its parent"):
        jkv.check(with_metadata(cache, free_blocks=ring))


def test_a_valid_cache_passes():
    for cache in (shared(), opened(), opened(14, 14)):
        jkv.check(cache)
        jkv.check(jax.tree.map(jnp.asarray, cache))

"""Values outside a cache: pytrees of arrays that can be pickled."""

import pickle

import jax
import numpy as np
import pytest
from support.small_caches import (
    allocate,
    append,
    free,
    opened,
    small_cache,
    write_tokens,
)

import jkv

pytestmark = pytest.mark.one_end


def spilled():
    cache = small_cache(num_blocks=24, prefix_caching=True)
    for sequence in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9]):
        cache, opened = allocate(cache, 0, tokens=[sequence])
        seq_id, start = int(opened.seq_ids[0]), int(opened.num_cached[0])
        cache, step = append(
            cache, seq_id, len(sequence) - start, tokens=sequence[start:]
        )
        cache = write_tokens(cache, step, sequence[start:])
        cache, _ = free(cache, seq_id)
    return jkv.spill(cache, 24)


def swapped():
    cache = opened(9, 6)
    return jkv.swap_out(cache, [0, 1])


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("take", [spilled, swapped])
def test_leaves_are_the_arrays(take):
    _, value = take()
    leaves, structure = jax.tree.flatten(value)
    assert len(leaves) > 3
    assert all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)
    assert type(jax.tree.unflatten(structure, leaves)) is type(value)
    assert sum(leaf.nbytes for leaf in leaves) == value.nbytes
    same(pickle.loads(pickle.dumps(value)), value)
    same(jax.tree.map(np.copy, value), value)
    same(jax.device_get(jax.jit(lambda value: value)(value)), value)


def test_spilled_blocks_are_restored_from_a_mapped_value():
    cache, value = spilled()
    assert value.num_blocks == 2
    plain, moved = (
        jkv.restore(cache, each) for each in (value, jax.tree.map(np.copy, value))
    )
    assert int(plain[1]) == int(moved[1]) > 0
    same(jax.tree.leaves(plain[0]), jax.tree.leaves(moved[0]))


def test_swapped_sequences_are_restored_from_a_device():
    cache, value = swapped()
    there = jax.device_put(value)
    same(jkv.swap_in(cache, there)[1], jkv.swap_in(cache, value)[1])

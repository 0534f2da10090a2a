"""Tests of buffer lifetimes: old values, donated values, and leaks."""

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import few
from support.small_caches import (
    copied,
    fork,
    grow,
    opened,
    small_config,
    stored_tokens,
    truncate,
    write_tokens,
)

import jkv


def i32(*values):
    return np.array(values, np.int32)


def turn(cache, number):
    """Open, grow, fork and free a sequence; the cache ends as it started."""
    cache, result = jkv.allocate(cache, i32(0))
    cache, batch = jkv.append(cache, result.seq_ids, i32(9), capacity=9)
    cache = write_tokens(cache, batch, jnp.full(9, number, jnp.float32))
    cache, child = jkv.fork(cache, result.seq_ids)
    cache, _ = jkv.truncate(cache, child.seq_ids, 3)
    cache, _ = jkv.free(cache, result.seq_ids)
    return jkv.free(cache, child.seq_ids)


def live_bytes():
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


@pytest.mark.further
@pytest.mark.one_end
def test_ten_thousand_donated_steps_leave_no_array():
    step = jax.jit(turn, donate_argnums=0)
    cache = copied(opened(6))
    number = jnp.float32(1)
    for _ in range(3):
        cache, status = step(cache, number)
    jax.block_until_ready((cache, status))
    before = live_bytes()
    for _ in range(10_000):
        cache, status = step(cache, number)
    jax.block_until_ready((cache, status))
    assert live_bytes() == before
    assert int(jkv.num_free_blocks(cache)) == 6
    assert int(cache.metadata.refusals.sum(dtype=jnp.uint32)) == 0
    jkv.check(cache)


@pytest.mark.one_end
def test_eager_turns_leave_no_array_behind():
    cache, _ = turn(opened(6), np.float32(1))
    before = live_bytes()
    for _ in range(5):
        cache, _ = turn(cache, np.float32(2))
    assert live_bytes() == before


def test_a_donated_cache_raises():
    cache = copied(opened(6))
    new, _ = jax.jit(jkv.fork, donate_argnums=0)(cache, i32(0))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(cache.metadata.context_lengths)
    for use in (lambda: jkv.append(cache, i32(0)), lambda: jkv.read(cache, 0, 0)):
        with pytest.raises(ValueError, match="cache was donated"):
            use()
    assert stored_tokens(new, 1) == list(range(6))
    # The repr of a deleted cache, for instance in a debugger, must not raise.
    assert len(repr(cache).splitlines()) < 25


def test_old_values_stay_readable_beside_other_threads():
    old = opened(6, 9)
    expected = [stored_tokens(old, 0), stored_tokens(old, 1)]
    failures = []
    started = threading.Barrier(4)

    def read_old():
        started.wait()
        for _ in range(10):
            found = [stored_tokens(old, 0), stored_tokens(old, 1)]
            if found != expected:
                failures.append(found)

    def make_new(number):
        started.wait()
        for _ in range(5):
            new, _ = truncate(old, 0, 0)
            new = grow(new, 0, [number] * 14)
            if stored_tokens(new, 0) != [number] * 14:
                failures.append(number)

    threads = [threading.Thread(target=read_old) for _ in range(2)]
    threads += [threading.Thread(target=make_new, args=(n,)) for n in (555, 666)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    jkv.check(old)


@pytest.mark.one_end
def test_values_from_one_ancestor_are_independent():
    """Each value made from a common ancestor keeps its own contents."""
    root = opened(5)
    left, right = grow(root, 0, [70]), grow(root, 0, [80, 81])
    past = list(range(5))
    assert stored_tokens(root, 0) == past
    assert stored_tokens(left, 0) == [*past, 70]
    assert stored_tokens(right, 0) == [*past, 80, 81]


@pytest.mark.parametrize("storage", few([True, False], True))
def test_no_two_leaves_share_a_buffer(storage):
    """Donation rejects duplicate buffers."""
    cache = jkv.init(small_config(), storage=storage)
    cache, _ = jax.jit(jkv.allocate, donate_argnums=0)(cache, i32(5))
    cache, _ = fork(cache, 0)
    pointers = [
        leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache) if leaf.size
    ]
    assert len(set(pointers)) == len(pointers)

"""Commits of many blocks at once: requests in order, lanes with equal keys."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.small_caches import (
    allocate,
    append,
    fork,
    match,
    small_cache,
    table,
    write_tokens,
)

import jkv
from jkv.operations import MOST_COMPARED, find_equals

pytestmark = pytest.mark.one_end

TOKENS = [10, 11, 12, 13, 14, 15, 16, 17]


def committed(cache, seq_id):
    return int(cache.metadata.index.committed[seq_id])


@pytest.mark.parametrize("is_decoding", [True, False], ids=["decoding", "any rows"])
@pytest.mark.parametrize("order", [(1, 0), (0, 1)], ids=["after", "before"])
def test_a_shared_block_is_replaced_by_an_earlier_entry(order, is_decoding):
    cache, _ = allocate(small_cache(prefix_caching=True), [0, 0])
    for seq_id in range(2):
        cache, step = append(cache, seq_id, 3, tokens=TOKENS[:3])
        cache = write_tokens(cache, step, TOKENS[:3])
    cache, batch = jkv.append(
        cache, np.array(order, np.int32), tokens=np.full(2, TOKENS[3], np.int32)
    )
    assert batch.is_decoding
    cache, _ = fork(cache, 0)  # its block is full, shared, and not visible
    batch = dataclasses.replace(batch, is_decoding=is_decoding)
    cache = jkv.commit(cache, batch)
    jkv.check(cache)
    assert match(cache, [[*TOKENS[:4], 0]]) == [4]
    is_after = order == (1, 0)
    assert (table(cache, 0) == table(cache, 1)) == is_after
    assert committed(cache, 0) == (4 if is_after else 0)
    assert committed(cache, 1) == 4


def test_blocks_after_a_shared_block_become_visible_with_it():
    cache, _ = allocate(small_cache(prefix_caching=True), [0, 0])
    cache, step = append(cache, [1, 0], 8, tokens=TOKENS * 2)
    cache, _ = fork(cache, 0, [4])
    cache = write_tokens(cache, step, TOKENS * 2)
    jkv.check(cache)
    assert table(cache, 0) == table(cache, 1) != table(cache, 2)
    assert committed(cache, 0) == committed(cache, 1) == 8


NUM_SEQUENCES, LENGTH = 24, 8


def commit_in_order(sequences, tables, is_shared):
    """Commit blocks of one token, request by request; return the tables."""
    index, ends = {}, []
    for sequence, row, shared in zip(sequences, tables, is_shared, strict=True):
        end = 0
        for end, block in enumerate(row):
            key = tuple(sequence[: end + 1])
            if shared[end] and key not in index:
                break
            row[end] = index.setdefault(key, block)
        else:
            end = len(row)
        ends.append(end)
    return tables, ends


@pytest.mark.parametrize("seed", range(3))
def test_a_call_of_many_trips_serves_requests_in_order(seed):
    """Half of the sequences are forked before the commit."""
    assert NUM_SEQUENCES * LENGTH > 2 * MOST_COMPARED
    rng = np.random.default_rng(seed)
    cache = small_cache(
        prefix_caching=True,
        num_blocks=NUM_SEQUENCES * LENGTH,
        block_size=1,
        max_sequences=2 * NUM_SEQUENCES,
        max_context_length=LENGTH,
    )
    cache, opened = jkv.allocate(cache, np.zeros(NUM_SEQUENCES, np.int32))
    sequences = rng.integers(2, size=(NUM_SEQUENCES, LENGTH)).astype(np.int32)
    sequences[:, :3] = 0  # many share a prefix
    cache, batch = jkv.append(
        cache,
        opened.seq_ids,
        LENGTH,
        capacity=sequences.size,
        tokens=sequences.reshape(-1),
    )
    lengths = rng.integers(LENGTH + 1, size=NUM_SEQUENCES) * rng.integers(
        2, size=NUM_SEQUENCES
    )
    parents = np.where(lengths > 0, np.asarray(opened.seq_ids), -1).astype(np.int32)
    cache, _ = jkv.fork(cache, parents, lengths.astype(np.int32))
    before = [table(cache, int(seq_id)) for seq_id in opened.seq_ids]
    is_shared = np.arange(LENGTH)[None] < lengths[:, None]
    expected, ends = commit_in_order(sequences.tolist(), before, is_shared)

    cache = jkv.commit(cache, batch)
    jkv.check(cache)
    assert [table(cache, int(seq_id)) for seq_id in opened.seq_ids] == expected
    assert [committed(cache, int(seq_id)) for seq_id in opened.seq_ids] == ends
    assert len(set(ends)) > 1


def test_lanes_with_equal_keys():
    rng = np.random.default_rng(0)
    keys, active = rng.integers(9, size=50), rng.random(50) < 0.7
    found = find_equals(jnp.asarray(keys, jnp.int32), jnp.asarray(active))
    for lane, key in enumerate(keys):
        equals = [i for i in range(50) if active[i] and keys[i] == key]
        assert int(found.first[lane]) == (equals[0] if equals else 50)
        assert int(found.rank[lane]) == sum(i < lane for i in equals)

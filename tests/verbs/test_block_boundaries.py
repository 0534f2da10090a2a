"""Blocks are taken exactly when the next token has no room, at every boundary."""

import jax.numpy as jnp
import pytest
from conftest import grow, opened, small_cache, stored_tokens, table

import jkv

BLOCK_SIZES = [1, 3, 4]


def num_taken(cache):
    return cache.num_blocks - int(jkv.num_free_blocks(cache))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_block_is_taken_at_tokens_0_t_2t(block_size):
    cache = opened(0, block_size=block_size, num_blocks=14)
    blocks_at = []
    for position in range(3 * block_size + 2):
        before = num_taken(cache)
        cache, batch = jkv.append(cache, jnp.array([0]))
        assert batch.status.tolist() == [jkv.Status.OK]
        assert batch.positions.tolist() == [position]
        if num_taken(cache) != before:
            assert num_taken(cache) == before + 1
            blocks_at.append(position)
        # The new block's first slot is the one just handed out.
        assert batch.block_ids.tolist() == [position // block_size]
        assert batch.offsets.tolist() == [position % block_size]
    assert blocks_at == list(range(0, 3 * block_size + 2, block_size))
    jkv.check(cache)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_one_append_around_a_boundary(block_size, num_blocks, beside):
    length = num_blocks * block_size + beside
    cache = grow(opened(0, block_size=block_size), 0, range(length))
    expected = -(-length // block_size)
    assert table(cache, 0) == list(range(expected))
    assert num_taken(cache) == expected
    assert stored_tokens(cache, 0) == list(range(length))
    # One more token takes a block only from a full one.
    cache, _ = jkv.append(cache, jnp.array([0]))
    assert num_taken(cache) == expected + (length % block_size == 0)
    jkv.check(cache)


@pytest.mark.parametrize("first", range(10))
@pytest.mark.parametrize("second", [0, 1, 3, 4, 5])
def test_two_appends_take_the_blocks_of_one(first, second):
    cache = opened(first)
    cache = grow(cache, 0, range(first, first + second))
    assert num_taken(cache) == -(-(first + second) // 4)
    assert int(cache.metadata.context_lengths[0]) == first + second
    assert stored_tokens(cache, 0) == list(range(first + second))


def test_nine_tokens_in_blocks_of_four_use_three():
    assert table(opened(9), 0) == [0, 1, 2]


def test_a_zero_token_append_at_a_boundary_takes_nothing():
    cache, batch = jkv.append(opened(8), jnp.array([0]), jnp.array([0]))
    assert batch.status.tolist() == [jkv.Status.OK]
    assert num_taken(cache) == 2


def test_a_reservation_is_used_before_the_pool():
    cache, result = jkv.allocate(small_cache(), jnp.array([9]))
    assert table(cache, 0) == [0, 1, 2]
    cache = grow(cache, 0, range(12))
    assert num_taken(cache) == 3
    cache = grow(cache, 0, [12])
    assert table(cache, 0) == [0, 1, 2, 3]


@pytest.mark.parametrize("count, blocks", [(0, 0), (1, 1), (4, 1), (5, 2), (14, 4)])
def test_a_reservation_is_rounded_up(count, blocks):
    cache, _ = jkv.allocate(small_cache(), jnp.array([count]))
    assert num_taken(cache) == blocks
    assert int(cache.metadata.context_lengths[0]) == 0


@pytest.mark.parametrize("length", range(10))
def test_truncate_returns_every_block_past_the_end(length):
    cache, status = jkv.truncate(opened(9), jnp.array([0]), jnp.array([length]))
    assert status.tolist() == [jkv.Status.OK]
    assert table(cache, 0) == [0, 1, 2][: -(-length // 4)]
    assert stored_tokens(cache, 0) == list(range(length))
    jkv.check(cache)


@pytest.mark.parametrize("length", range(10))
def test_fork_shares_full_blocks_and_copies_a_tail(length):
    cache, result = jkv.fork(opened(length), jnp.array([0]))
    full, tail = divmod(length, 4)
    assert table(cache, 1)[:full] == table(cache, 0)[:full]
    assert num_taken(cache) == full + 2 * (tail > 0)
    assert stored_tokens(cache, 1) == list(range(length))
    jkv.check(cache)


@pytest.mark.parametrize("max_context", [1, 3, 4, 5, 13])
def test_the_longest_context_is_exact(max_context):
    cache = opened(max_context - 1, max_context_length=max_context)
    cache = grow(cache, 0, [max_context - 1])
    assert stored_tokens(cache, 0) == list(range(max_context))
    cache, batch = jkv.append(cache, jnp.array([0]))
    assert batch.status.tolist() == [jkv.Status.CONTEXT_FULL]
    assert num_taken(cache) == -(-max_context // 4)
    jkv.check(cache)


def test_several_blocks_at_once_or_none():
    cache = opened(3, num_blocks=3)
    cache, batch = jkv.append(cache, jnp.array([0]), jnp.array([10]), capacity=16)
    assert batch.status.tolist() == [jkv.Status.OUT_OF_BLOCKS]  # 13 tokens: 4 blocks
    assert table(cache, 0) == [0]
    cache = grow(cache, 0, range(3, 12))  # 12 tokens: 3 blocks
    assert table(cache, 0) == [0, 1, 2]
    assert stored_tokens(cache, 0) == list(range(12))

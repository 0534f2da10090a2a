"""Tests of compact and resize: block ids change, contents are bit-identical."""

import functools
import logging
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.caches import random_operations
from support.caches.random_reuse import ReuseGame, make_reuse_verbs
from support.compiled_hlo import ALL_PASSES
from support.jax_versions import further
from support.small_caches import (
    allocate,
    append,
    copied,
    fork,
    free,
    grow,
    match,
    opened,
    ring_order,
    small_cache,
    small_config,
    stored_tokens,
    table,
    tables,
    truncate,
    with_metadata,
    write_tokens,
)

import jkv
from jkv.blocks.renumbering import in_order
from jkv.prefixes import hash_tables

pytestmark = pytest.mark.one_end

DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16]
NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM, VALUE_HEAD_DIM = 3, 2, 4, 8, 6
NUM_ROWS = 17


def step(cache, rng, seq_ids, counts):
    """Append and write random rows; return the cache and the batch."""
    rows = sum(counts)
    padding = 5 - len(seq_ids)
    cache, batch = jkv.append(
        cache, [*seq_ids, *[-1] * padding], [*counts, *[0] * padding], capacity=NUM_ROWS
    )
    jkv.raise_for_status(batch.status)
    for layer in range(cache.num_layers):
        keys, values = (
            np.zeros((NUM_ROWS, cache.num_kv_heads, width), np.float32)
            for width in (cache.head_dim, cache.value_head_dim)
        )
        keys[:rows] = rng.standard_normal((rows, *keys.shape[1:]), np.float32)
        values[:rows] = rng.standard_normal((rows, *values.shape[1:]), np.float32)
        cache = jkv.write(cache, layer, batch, keys, values)
    return jkv.commit(cache, batch), batch


@functools.cache
def churned(dtype=jnp.float32, **changes):
    """Return four sequences, two sharing blocks, with free blocks between them."""
    cache = small_cache(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        value_head_dim=VALUE_HEAD_DIM,
        dtype=dtype,
        **dict(num_blocks=24, max_sequences=6, max_context_length=30) | changes,
    )
    rng = np.random.default_rng(5)
    cache, _ = allocate(cache, [0] * 4)
    cache, _ = allocate(cache, 0)
    for _ in range(4):  # interleaved, so that no sequence has consecutive blocks
        cache, _ = step(cache, rng, [0, 1, 2, 3, 4], [3, 5, 4, 2, 3])
    cache, _ = free(cache, [1, 3])
    cache, _ = fork(cache, [2])
    cache, _ = truncate(cache, [0], [7])
    jkv.check(cache)
    return cache


@jax.jit
def read_all(cache):
    """Return keys, values and length of every sequence in every layer."""
    of_sequences = jax.vmap(jkv.read, (None, None, 0))
    counts = cache.num_layers, cache.max_sequences
    ids = [np.arange(count, dtype=np.int32) for count in counts]
    return jax.vmap(of_sequences, (None, 0, None))(cache, *ids)


def contents(cache):
    """Return the valid part of `read_all`, as bytes."""
    keys, values, lengths = jax.device_get(read_all(cache))
    return [
        (length, keys[place][:length].tobytes(), values[place][:length].tobytes())
        for place, length in np.ndenumerate(lengths)
    ]


def attention(cache, counts, implementation):
    """Return the outputs of one more step in all layers, as bytes."""
    rng = np.random.default_rng(8)
    seq_ids = np.flatnonzero(np.asarray(cache.metadata.is_open)).tolist()
    cache, batch = step(cache, rng, seq_ids, counts)
    queries = np.zeros((NUM_ROWS, NUM_HEADS, HEAD_DIM), np.float32)
    shape = sum(counts), NUM_HEADS, HEAD_DIM
    queries[: sum(counts)] = rng.standard_normal(shape, np.float32)
    return np.asarray(attend_all(cache, batch, queries, implementation)).tobytes()


@functools.partial(jax.jit, static_argnums=3)
def attend_all(cache, batch, queries, implementation):
    """Attend in all layers; return [L, R, H, D]."""
    layers = [
        jkv.attend(cache, layer, batch, queries, implementation=implementation)
        for layer in range(cache.num_layers)
    ]
    return jnp.stack(layers)


class TestFragmentation:
    def test_fragmentation_equals_hand_computed_values(self):
        # Blocks 0 to 3 hold sequences 0 (6 tokens) and 1 (5). The fork of 1 shares
        # block 2 and gets block 4. After freeing sequence 0, blocks 2, 3 and 4 are
        # live: 4 + 1 + 1 of 12 slots filled, 4 table entries, 2 of the blocks 0 to 4
        # free.
        cache, _ = fork(opened(6, 5), [1])
        cache, _ = free(cache, [0])
        assert [table(cache, row) for row in (1, 2)] == [[2, 3], [2, 4]]
        found = jkv.fragmentation(cache)
        assert found == (pytest.approx(1 - 6 / 12), 4 / 3, pytest.approx(2 / 5))

    def test_an_empty_pool_has_none(self):
        assert jkv.fragmentation(small_cache()) == (0.0, 1.0, 0.0)
        assert not jkv.should_compact(small_cache(), threshold=0.0)

    def test_a_full_pool_without_waste_has_none(self):
        assert jkv.fragmentation(opened(12, 12, 8)) == (0.0, 1.0, 0.0)

    def test_a_reservation_is_waste_while_it_lasts(self):
        cache, _ = allocate(small_cache(), [8])
        assert jkv.fragmentation(cache).internal == 1.0
        cache = grow(cache, 0, range(6))
        assert jkv.fragmentation(cache).internal == 0.25

    def test_compacting_removes_only_the_spread(self):
        cache = churned()
        before, after = (jkv.fragmentation(c) for c in (cache, jkv.compact(cache)))
        assert before.spread > 0.3 and after.spread == 0.0
        assert before[:2] == after[:2]

    def test_should_compact_compares_the_spread(self):
        cache = churned()
        spread = jkv.fragmentation(cache).spread
        assert jkv.should_compact(cache)
        assert jkv.should_compact(cache, spread - 0.01)
        assert not jkv.should_compact(cache, spread)
        assert not jkv.should_compact(jkv.compact(cache), 0.0)
        for threshold in (-0.1, 1.1, math.nan):
            with pytest.raises(ValueError, match="0..1"):
                jkv.should_compact(cache, threshold)


class TestCompact:
    def test_block_ids_after_compaction(self):
        cache = opened(6, 5, 9)  # blocks 01, 23, 456; 7 is free
        cache, _ = fork(cache, [1])  # 2 is shared, 7 a copy of 3
        cache, _ = free(cache, [0])  # 1 is free, then 0
        assert tables(cache) == [[], [2, 3], [4, 5, 6], [2, 7]]
        assert ring_order(cache) == [1, 0]
        cache = jkv.compact(cache)
        jkv.check(cache)
        assert tables(cache) == [[], [0, 1], [2, 3, 4], [0, 5]]
        assert ring_order(cache) == [6, 7]
        counts = cache.metadata.groups[0].reference_counts
        assert counts.tolist() == [2, 1, 1, 1, 1, 1, 0, 0]
        assert [stored_tokens(cache, row) for row in (1, 2, 3)] == [
            [100, 101, 102, 103, 104],
            [200, 201, 202, 203, 204, 205, 206, 207, 208],
            [100, 101, 102, 103, 104],
        ]

    def test_blocks_are_consecutive_afterwards(self):
        cache, _ = free(churned(), [5])
        assert any(row != list(range(row[0], row[-1] + 1)) for row in tables(cache)[:1])
        for row in tables(jkv.compact(cache)):
            assert not row or row == list(range(row[0], row[0] + len(row)))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_contents_stay_bit_identical(self, dtype):
        cache = churned(dtype)
        compacted = jkv.compact(cache)
        jkv.check(compacted)
        assert tables(compacted) != tables(cache)
        assert contents(compacted) == contents(cache)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("implementation", ["xla", "reference"])
    @pytest.mark.parametrize("counts", [[1, 1, 1, 1], [3, 1, 5, 2]])
    def test_attention_stays_bit_identical(self, counts, implementation, dtype):
        cache = churned(dtype)
        compacted = jkv.compact(cache)
        expected = attention(cache, counts, implementation)
        assert attention(compacted, counts, implementation) == expected
        # A wrong permutation or length would change the result.
        unmoved = compacted.with_storage(cache.storage)
        assert attention(unmoved, counts, implementation) != expected
        lengths = np.array(compacted.metadata.context_lengths)
        lengths -= lengths > 0
        shorter = with_metadata(compacted, context_lengths=lengths)
        assert attention(shorter, counts, implementation) != expected

    def test_blocks_are_allocated_in_the_same_order(self):
        cache = churned()
        order, taken = ring_order(cache), tables(cache)
        compacted = jkv.compact(cache)
        live = cache.num_blocks - len(order)
        assert ring_order(compacted) == list(range(live, cache.num_blocks))
        # Free block i of the ring is now block live + i, as the contents show.
        keys, moved = (
            np.asarray(each.storage[0].key_pool) for each in (cache, compacted)
        )
        np.testing.assert_array_equal(keys[:, order], moved[:, live:])
        assert taken == tables(cache)  # the old value is unchanged

    def test_compactions_are_counted_and_advance_the_clock(self):
        cache = churned()
        clock = jkv.stats(cache).clock
        cache = jkv.compact(cache)
        cache, _ = allocate(cache, [0])
        cache = jkv.compact(jkv.compact(cache))
        stats = jkv.stats(cache)
        assert (stats.compactions, stats.last_compaction) == (3, clock + 1)
        assert stats.clock == clock + 1
        # A full ring, an empty ring and the peak are preserved.
        assert stats.peak_blocks == jkv.stats(churned()).peak_blocks

    @pytest.mark.parametrize("lengths", [(), (12, 12, 8), (14, 14)])
    def test_empty_full_and_ordered_pools(self, lengths):
        cache = opened(*lengths)
        compacted = jkv.compact(cache)
        jkv.check(compacted)
        assert tables(compacted) == tables(cache)
        assert ring_order(compacted) == ring_order(cache)
        for row, length in enumerate(lengths):
            expected = list(range(100 * row, 100 * row + length))
            assert stored_tokens(compacted, row) == expected

    def test_metadata_alone_and_recorded_tokens(self):
        config = small_config(record_tokens=True)
        cache = jkv.init(config, storage=False)
        cache, _ = allocate(cache, [0, 0])
        for token in range(6):
            cache, _ = append(cache, [0, 1], tokens=[token, 10 + token])
        cache, _ = free(cache, [0])
        cache = jkv.compact(cache)
        jkv.check(cache)
        assert table(cache, 1) == [0, 1]
        assert jkv.tokens(cache, 1).tolist()[:6] == [10, 11, 12, 13, 14, 15]

    def test_jitted_once_and_inside_loops(self):
        jitted = jax.jit(chex.assert_max_traces(jkv.compact, n=1), donate_argnums=0)
        expected = contents(churned())
        assert contents(jitted(copied(churned()))) == expected
        cache, _ = free(churned(), [5])
        kept = contents(cache)
        assert contents(jitted(copied(cache))) == kept

        @jax.jit
        def loop(cache):
            return jax.lax.fori_loop(0, 3, lambda _, c: jkv.compact(c), cache)

        looped = loop(churned())
        assert contents(looped) == expected and jkv.stats(looped).compactions == 3

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_donated_storage_is_permuted_in_place(self, dtype):
        config = small_config(
            num_layers=8,
            num_kv_heads=2,
            head_dim=16,
            value_head_dim=24,
            num_blocks=4099,
            block_size=8,
            max_context_length=100,
            dtype=dtype,
        )
        cache = jax.eval_shape(lambda: jkv.init(config))
        compiled = (
            jax.jit(jkv.compact, donate_argnums=0).lower(cache).compile(ALL_PASSES)
        )
        pools = [
            math.prod(pool.shape) * pool.dtype.itemsize
            for pool in jax.tree.leaves(cache.storage)
        ]
        memory = compiled.memory_analysis()
        # All arrays are aliased; the scratch is one layer of the larger pool.
        assert memory.alias_size_in_bytes >= sum(pools)
        assert memory.temp_size_in_bytes < 1.05 * max(pools) / config.num_layers


class TestResize:
    @pytest.mark.parametrize("num_blocks", [24, 60, *further([25])])
    def test_growing_keeps_every_id(self, num_blocks):
        cache = churned()
        grown = jkv.resize(cache, num_blocks)
        jkv.check(grown)
        assert tables(grown) == tables(cache) and contents(grown) == contents(cache)
        # The new blocks are allocated first.
        new = list(range(24, num_blocks))
        assert ring_order(grown) == new + ring_order(cache)
        assert not np.asarray(grown.storage[0].key_pool)[:, 24:].any()
        stats = jkv.stats(grown)
        assert stats.compactions == 0
        assert stats.peak_blocks == jkv.stats(cache).peak_blocks
        assert stats.frees == jkv.stats(cache).frees

    def test_refused_requests_fit_after_resize(self):
        cache = opened(12, 12, 8)
        cache, refused = allocate(cache, [4])
        assert int(refused.status[0]) == jkv.Status.OUT_OF_BLOCKS
        cache = jkv.resize(cache, 9)
        cache, served = allocate(cache, [0])
        cache = grow(cache, int(served.seq_ids[0]), [1, 2, 3, 4])
        jkv.check(cache)
        assert stored_tokens(cache, 3) == [1, 2, 3, 4]

    def test_shrinking_moves_live_blocks_only_if_it_must(self):
        cache = opened(6, 5, 9)  # blocks 01, 23, 456
        cache, _ = free(cache, [2])  # the ring: 7, 6, 5, 4
        shrunk = jkv.resize(cache, 6)
        assert tables(shrunk)[:2] == [[0, 1], [2, 3]]
        assert ring_order(shrunk) == [5, 4]
        assert jkv.stats(shrunk).compactions == 0
        cache = opened(6, 5, 9)
        cache, _ = free(cache, [0])  # the ring: 7, 1, 0
        shrunk = jkv.resize(cache, 6)
        assert tables(shrunk)[1:3] == [[0, 1], [2, 3, 4]]
        assert ring_order(shrunk) == [5]
        stats = jkv.stats(shrunk)
        assert (stats.compactions, stats.last_compaction) == (1, stats.clock)
        for cache in (shrunk, jkv.resize(shrunk, 5)):
            jkv.check(cache)
            assert stored_tokens(cache, 1) == list(range(100, 105))
            assert stored_tokens(cache, 2) == list(range(200, 209))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_down_to_the_live_blocks_and_up_again(self, dtype):
        cache = churned(dtype)
        live = jkv.stats(cache).live_blocks
        kept = contents(cache)
        smallest = jkv.resize(cache, live)
        jkv.check(smallest)
        assert jkv.stats(smallest).free_blocks == 0 and contents(smallest) == kept
        again = jkv.resize(smallest, 24)
        jkv.check(again)
        assert contents(again) == kept
        expected = attention(cache, [1, 1, 1, 1], None)
        assert attention(again, [1, 1, 1, 1], None) == expected

    def test_live_blocks_are_never_lost(self):
        cache = churned()
        live = jkv.stats(cache).live_blocks
        for too_few in (live - 1, 1):
            with pytest.raises(ValueError, match=f"^{live} live blocks .* {too_few};"):
                jkv.resize(cache, too_few)
        for wrong in (0, -3, 2**30, 2.5, True):
            with pytest.raises(ValueError, match="num_blocks"):
                jkv.resize(cache, wrong)
        assert contents(cache) == contents(churned())

    def test_resized_bytes_equal_the_configuration(self):
        for changes in (dict(), dict(record_tokens=True), dict(prefix_caching=True)):
            for size in (3, 8, 21):
                cache = jkv.resize(small_cache(**changes), size)
                config = small_config(num_blocks=size, **changes)
                assert cache.nbytes == config.bytes
                fresh = jkv.init(config)
                chex.assert_trees_all_equal_shapes_and_dtypes(cache, fresh)
                jkv.check(cache)

    def test_metadata_alone(self):
        cache = jkv.init(small_config(), storage=False)
        cache, _ = allocate(cache, [9])
        cache = jkv.resize(cache, 3)
        jkv.check(cache)
        assert (cache.num_layers, jkv.stats(cache).free_blocks) == (0, 0)

    def test_the_peak_is_kept_as_far_as_it_fits(self):
        cache, _ = free(opened(12, 12), [0])
        assert jkv.stats(jkv.resize(cache, 30)).peak_blocks == 6
        assert jkv.stats(jkv.resize(cache, 4)).peak_blocks == 4

    def test_logged_only_outside_jit(self, caplog):
        caplog.set_level(logging.INFO, logger="jkv")
        cache = churned()
        jax.jit(jkv.compact)(jkv.compact(cache))
        assert not caplog.records
        jkv.resize(cache, jkv.stats(cache).live_blocks)
        (record,) = caplog.records
        assert record.name == "jkv.resizing" and record.levelno == logging.INFO
        assert "from 24 to" in record.message and "renumbered" in record.message


A, B, C = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9], [7, 7, 7, 7, 6, 6, 6, 6]


def open_prompt(cache, prompt, salt=0):
    """Open a sequence for a prompt, and compute its uncached tokens.

    A token's content is its id. Return the cache, the sequence and the cached length.
    """
    cache, opened = allocate(cache, 0, tokens=[prompt], salts=salt)
    jkv.raise_for_status(opened.status)
    found = int(opened.num_cached[0])
    rest = prompt[found:]
    cache, step = append(cache, opened.seq_ids, len(rest), tokens=rest)
    jkv.raise_for_status(step.status)
    return write_tokens(cache, step, rest), int(opened.seq_ids[0]), found


def found_of(cache, *prompts, salt=0):
    """Return the number of cached tokens of each prompt with one more token."""
    longer = [[*prompt, 0] for prompt in prompts]
    return sum(
        (match(cache, longer[i : i + 4], salt) for i in range(0, len(longer), 4)), []
    )


@functools.cache
def reused(**changes):
    """Return a cache: B holds blocks 0 (shared by A) and 2; 1, 4 and 3 are cached."""
    cache = small_cache(prefix_caching=True, **changes)
    for prompt in (A, B, C):
        cache, _, _ = open_prompt(cache, prompt)
    cache, _ = free(cache, [0])
    cache, _ = free(cache, [2])
    jkv.check(cache)
    return cache


class TestPrefixIndex:
    def test_the_cache_shared_by_these_tests(self):
        cache = reused()
        assert tables(cache) == [[], [0, 2], [], []]
        assert ring_order(cache) == [5, 6, 7, 1, 4, 3]
        assert found_of(cache, A, B, C) == [8, 8, 8]
        stats = jkv.stats(cache)
        assert (stats.cached_blocks, stats.pinned_blocks) == (3, 2)
        assert (stats.prefix_queries, stats.prefix_hits) == (3, 4)

    def assert_true(self, cache, *prompts):
        """Assert that cached blocks hold the prompts' tokens, by computing a step."""
        for prompt in prompts:
            (expected,) = found_of(cache, prompt)
            cache, seq_id, found = open_prompt(cache, prompt + [0])
            assert found == expected
            jkv.check(cache)
            assert stored_tokens(cache, seq_id) == prompt + [0]
            cache, _ = free(cache, seq_id)

    def test_the_index_follows_its_blocks(self):
        cache = jkv.compact(reused())
        jkv.check(cache)
        assert tables(cache)[1] == [0, 1]
        assert ring_order(cache) == [2, 3, 4, 5, 6, 7]
        # Full blocks, and a partial hit.
        part = [7, 7, 7, 7, 6, 6, 5]
        assert found_of(cache, A, B, C, part) == [8, 8, 8, 6]
        assert found_of(cache, A, salt=1) == [0]
        assert jkv.stats(cache).cached_blocks == 3
        self.assert_true(cache, C, A, B, part)

    def test_cached_blocks_keep_their_eviction_order(self):
        cache = jkv.compact(reused())
        for expected in ([4, 8, 8], [4, 8, 4], [4, 8, 0]):
            cache = jkv.evict_cached(cache, 1)
            assert found_of(cache, A, B, C) == expected

    def test_holes_in_the_ring_are_removed(self):
        cache, opened = allocate(reused(), 0, tokens=[[*C, 0]])
        assert opened.num_cached.tolist() == [8]
        ring = cache.metadata.groups[0].free_blocks
        assert (int(ring.span), int(ring.count)) == (6, 4)
        cache = jkv.compact(cache)
        jkv.check(cache)
        ring = cache.metadata.groups[0].free_blocks
        assert ring.bounds[:3].tolist() == [0, 4, 4]
        assert found_of(cache, A, B, C) == [8, 8, 8]
        self.assert_true(cache, A)

    @pytest.mark.parametrize(
        "num_blocks, expected, evicted",
        [
            (20, [8, 8, 8], 0),
            (2, [4, 8, 0], 3),
            *further([(9, [8, 8, 8], 0), (7, [8, 8, 8], 0), (5, [8, 8, 8], 0)]),
            *further([(4, [4, 8, 8], 1), (3, [4, 8, 4], 2)]),
        ],
    )
    def test_the_oldest_cached_blocks_are_evicted_first(
        self, num_blocks, expected, evicted
    ):
        before = reused()
        cache = jkv.resize(before, num_blocks)
        jkv.check(cache)
        assert found_of(cache, A, B, C) == expected
        stats = jkv.stats(cache)
        assert (stats.cached_blocks, stats.evicted_blocks) == (3 - evicted, evicted)
        assert stats.pinned_blocks == 2
        assert stored_tokens(cache, 1) == B
        if num_blocks in (5, 20):
            self.assert_true(cache, C, A, B, [7, 7, 7, 7, 6, 6, 5])
        assert found_of(before, A, B, C) == [8, 8, 8]

    def test_new_blocks_are_allocated_before_cached_ones(self):
        cache = jkv.resize(reused(), 10)
        assert ring_order(cache) == [8, 9, 5, 6, 7, 1, 4, 3]

    def test_sequences_continue_to_commit_after_a_resize(self):
        cache = jkv.resize(reused(), 20)
        more = [3, 3, 3, 3]
        cache, step = append(cache, 1, 4, tokens=more)
        cache = write_tokens(cache, step, more)
        jkv.check(cache)
        assert found_of(cache, B + more) == [12]

    @pytest.mark.parametrize("num_blocks", [40, *further([90])])
    def test_a_full_row_of_the_new_index_only_loses_hits(self, num_blocks, monkeypatch):
        cache = small_cache(
            num_blocks=64, max_sequences=30, max_context_length=12, prefix_caching=True
        )
        prompts = [[i] * 4 + [50 + i] * 4 for i in range(14)]
        for prompt in prompts:
            cache, _, _ = open_prompt(cache, prompt)
        cache, _ = jkv.free(cache, list(range(7)))
        assert found_of(cache, *prompts) == [8] * 14
        row = hash_tables.row_of
        monkeypatch.setattr(
            hash_tables,
            "row_of",
            lambda index, hashes: (
                row(index, hashes) * (0 if index.num_blocks == num_blocks else 1)
            ),
        )
        # A pool size of its own, so that no compiled program is shared with other
        # tests.
        cache = jkv.resize(cache, num_blocks)
        jkv.check(cache)
        found = found_of(cache, *prompts)
        stats = jkv.stats(cache)
        assert sum(found) == 4 * (stats.cached_blocks + stats.pinned_blocks) > 0
        assert stats.cached_blocks + stats.pinned_blocks <= 12
        assert stats.evicted_blocks == 14 - stats.cached_blocks

    def test_a_permutation_contains_every_block_once(self):
        cache, _, _ = open_prompt(reused(), C + [0])
        blocks, live = in_order(cache.metadata.groups[0])
        assert sorted(blocks.tolist()) == list(range(8)) and int(live) == 5


class ResizingGame(ReuseGame):
    """Random operations with prompts, interleaved with resizes of the pool."""

    num_resizes = num_refused = 0

    def play_resize(self):
        num_blocks = 6 if self.cache.num_blocks == 15 else 15
        if self.oracle.resize(num_blocks):
            self.num_resizes += 1
            self.cache = jkv.resize(self.cache, num_blocks)
        else:
            self.num_refused += 1
            with pytest.raises(ValueError, match="live blocks do not fit"):
                jkv.resize(self.cache, num_blocks)

    def plays(self):
        return [*super().plays(), (self.play_resize, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [43, *further([44])])
def test_random_operations_between_resizes(seed):
    """Contents and eviction order equal the oracle's at every size."""
    verbs = make_reuse_verbs("eager")
    # One trace per size.
    verbs["read_all"] = jax.jit(random_operations.read_all)
    game = ResizingGame((15, 2, 5, 9), verbs, seed)
    game.play(num_operations=35)
    assert game.num_resizes > 1

"""Swapping out and in: moved and remaining blocks, and decoding afterwards."""

import dataclasses
import functools
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import few
from support.small_caches import (
    WIDTH,
    allocate,
    append,
    copied,
    fork,
    free,
    free_count,
    grow,
    match,
    opened,
    refusal_counts,
    small_cache,
    small_config,
    stored_tokens,
    table,
    with_storage_filled,
    without_refusals,
    write_tokens,
)

import jkv
from jkv.blocks import contents

DTYPES, NAME = [jnp.float32, jnp.bfloat16], operator.attrgetter("__name__")


def state(cache):
    """Return all leaves as bytes."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache)]


def fragmented(**changes):
    """Return a larger cache with the free blocks 12 13 14 8 7 3 2 1 0."""
    cache = opened(9, 3, 12, 5, 7, num_blocks=15, max_sequences=7, **changes)
    cache, _ = free(cache, [3, 1, 0])
    return grow(cache, 4, range(900, 902))


class TestOutAndBack:
    def test_one_of_many(self):
        cache = opened(5, 9, 2)
        cache, swapped = jkv.swap_out(cache, 1)
        jkv.check(cache)
        assert not bool(cache.metadata.is_open[1])
        assert free_count(cache) == 8 - 2 - 1
        cache = grow(cache, 0, range(5, 14))  # reuses its blocks
        cache, back = jkv.swap_in(cache, swapped)
        jkv.check(cache)
        jkv.raise_for_status(back)
        (seq_id,) = back.seq_ids.tolist()
        assert stored_tokens(cache, seq_id) == list(range(100, 109))
        assert stored_tokens(cache, 0) == list(range(14))
        assert stored_tokens(cache, 2) == [200, 201]
        cache = grow(cache, seq_id, [109])
        assert stored_tokens(cache, seq_id) == list(range(100, 110))

    @pytest.mark.one_end
    def test_keeps_the_order_of_the_call_and_drops_padding(self):
        cache, swapped = jkv.swap_out(opened(5, 9, 2), [2, -1, 0])
        assert swapped.seq_ids.tolist() == [2, 0]
        assert swapped.context_lengths.tolist() == [2, 5]
        cache, back = jkv.swap_in(cache, swapped)
        assert [stored_tokens(cache, int(i)) for i in back.seq_ids] == [
            [200, 201],
            [0, 1, 2, 3, 4],
        ]

    @pytest.mark.one_end
    def test_into_a_fragmented_cache_of_another_size(self):
        cache, swapped = jkv.swap_out(opened(9, 14), [0, 1])
        other = fragmented()
        before = {i: stored_tokens(other, i) for i in (2, 4)}
        other, back = jkv.swap_in(other, swapped)
        jkv.check(other)
        first, second = back.seq_ids.tolist()
        assert stored_tokens(other, first) == list(range(9))
        assert stored_tokens(other, second) == list(range(100, 114))
        assert table(other, first) == [12, 13, 14]
        assert table(other, second) == [8, 7, 3, 2]
        assert {i: stored_tokens(other, i) for i in (2, 4)} == before

    @pytest.mark.one_end
    def test_one_value_several_times(self):
        """The value stays valid: two copies of one sequence share nothing."""
        cache, swapped = jkv.swap_out(opened(6), 0)
        cache, first = jkv.swap_in(cache, swapped)
        cache, second = jkv.swap_in(cache, swapped)
        a, b = int(first.seq_ids[0]), int(second.seq_ids[0])
        cache = grow(cache, a, [77])
        assert stored_tokens(cache, a) == [0, 1, 2, 3, 4, 5, 77]
        assert stored_tokens(cache, b) == [0, 1, 2, 3, 4, 5]
        assert not set(table(cache, a)) & set(table(cache, b))

    @pytest.mark.one_end
    def test_no_sequence(self):
        cache = opened(3)
        after, swapped = jkv.swap_out(cache, [-1, -1])
        assert swapped.num_sequences == 0 and swapped.num_blocks == 0
        assert state(after) == state(cache)
        after, back = jkv.swap_in(after, swapped)
        assert back.seq_ids.shape == (0,) and state(after) == state(cache)

    @pytest.mark.one_end
    def test_without_tokens_and_without_storage(self):
        """Reservations move as numbers; a cache without storage suffices."""
        for cache in (small_cache(), jkv.init(small_config(), storage=False)):
            cache, _ = allocate(cache, [0, 9])
            cache, swapped = jkv.swap_out(cache, [0, 1])
            assert (swapped.num_filled_blocks, swapped.num_blocks) == (0, 3)
            cache, back = jkv.swap_in(cache, swapped)
            jkv.check(cache)
            assert [len(table(cache, int(i))) for i in back.seq_ids] == [0, 3]

    @pytest.mark.one_end
    def test_recorded_tokens_are_moved(self):
        cache = small_cache(record_tokens=True)
        cache, _ = allocate(cache, [0])
        cache, _ = append(cache, 0, 6, tokens=range(40, 46))
        cache, swapped = jkv.swap_out(cache, 0)
        other, back = jkv.swap_in(fragmented(record_tokens=True), swapped)
        found = jkv.tokens(other, back.seq_ids[0]).tolist()
        assert found[:7] == [40, 41, 42, 43, 44, 45, -1]
        # A cache that does not record tokens drops them; one that does reads -1.
        other, back = jkv.swap_in(fragmented(), swapped)
        jkv.check(other)
        other, swapped = jkv.swap_out(other, back.seq_ids)
        cache, back = jkv.swap_in(cache, swapped)
        assert jkv.tokens(cache, back.seq_ids[0]).tolist() == [-1] * 14

    @pytest.mark.one_end
    def test_reservations_are_kept_without_contents(self):
        cache, _ = allocate(small_cache(), [13])
        cache = grow(cache, 0, range(5))
        cache, swapped = jkv.swap_out(cache, 0)
        assert (swapped.num_filled_blocks, swapped.num_blocks) == (2, 4)
        cache, back = jkv.swap_in(cache, swapped)
        assert free_count(cache) == 4
        cache = grow(cache, int(back.seq_ids[0]), range(5, 14))
        assert free_count(cache) == 4

    @pytest.mark.one_end
    def test_clocks_and_uses(self):
        """The clock belongs to the cache, the number of uses to the sequence."""
        cache = grow(opened(5, 2), 0, [5])
        uses = int(cache.metadata.sequences.num_uses[0])
        cache, swapped = jkv.swap_out(cache, 0)
        cache, back = jkv.swap_in(cache, swapped)
        seq_id, meta = int(back.seq_ids[0]), cache.metadata.sequences
        assert int(meta.created[seq_id]) == int(meta.last_used[seq_id])
        assert int(meta.last_used[seq_id]) > int(meta.last_used[1])
        assert int(meta.num_uses[seq_id]) == uses == 2


@pytest.mark.one_end
class TestSharing:
    def test_is_kept_among_swapped_sequences(self):
        cache, forked = fork(opened(9), [0, 0])
        cache = grow(cache, 1, [901])
        cache, swapped = jkv.swap_out(cache, [2, 0, 1])
        # Two full blocks shared by all three, and a tail for each.
        assert swapped.num_filled_blocks == swapped.num_blocks == 2 + 3
        assert free_count(cache) == 8
        cache, back = jkv.swap_in(cache, swapped)
        jkv.check(cache)
        rows = [table(cache, int(i)) for i in back.seq_ids]
        assert rows[0][:2] == rows[1][:2] == rows[2][:2]
        assert len({row[2] for row in rows}) == 3
        expected = [list(range(9)), list(range(9)), [*range(9), 901]]
        assert [stored_tokens(cache, int(i)) for i in back.seq_ids] == expected

    def test_swap_out_shared_blocks_with_an_open_sequence(self):
        cache, _ = fork(opened(9), [0])
        stays = table(cache, 1)
        cache, swapped = jkv.swap_out(cache, 0)
        assert free_count(cache) == 8 - 3  # only its tail was freed
        assert table(cache, 1) == stays
        cache, back = jkv.swap_in(cache, swapped)
        jkv.check(cache)
        assert free_count(cache) == 8 - 6
        assert not set(table(cache, int(back.seq_ids[0]))) & set(stays)
        for seq_id in (1, int(back.seq_ids[0])):
            assert stored_tokens(cache, seq_id) == list(range(9))

    def test_only_the_blocks_of_the_sequences_are_copied(self):
        """The value's size is exactly theirs."""
        cache = opened(9, 14, 2, num_layers=3, value_head_dim=1)
        pools = jax.tree.leaves(cache.storage)
        per_block = sum(pool.nbytes for pool in pools) // cache.num_blocks
        _, swapped = jkv.swap_out(cache, [0, 2])
        stored = jax.tree.leaves(swapped.groups[0].contents)
        assert sum(a.nbytes for a in stored) == 4 * per_block
        assert all(type(a) is np.ndarray for a in stored)
        # Tables, ids, lengths, uses and released columns.
        rows = 2 * (cache.max_blocks_per_sequence + 4) * 4
        assert swapped.nbytes == 4 * per_block + rows


def attended(cache, seq_ids, dtype, steps=3):
    """Decode a few tokens of each sequence; return all outputs, [steps, L, B, ...].

    Queries, keys and values depend only on the step, the layer and the request.
    """
    rng = np.random.default_rng(5)
    num_requests, outputs = len(seq_ids), []
    padded = np.full(WIDTH, -1, np.int32)
    padded[:num_requests] = seq_ids
    for _ in range(steps):
        cache, batch = jkv.append(cache, padded)
        jkv.raise_for_status(batch.status)
        rows = np.zeros((2, 3, WIDTH, 4, 8), dtype)
        rows[:, :, :num_requests] = rng.standard_normal((2, 3, num_requests, 4, 8))
        cache, found = advance(cache, batch, rows)
        outputs.append(np.asarray(found)[:, :num_requests])
    return np.stack(outputs)


@jax.jit
def advance(cache, batch, rows):
    """Write rows and attend to them in two layers; return the outputs, [L, R, ...]."""
    outputs = []
    for layer in range(2):
        queries, keys, values = rows[layer]
        cache = jkv.write(cache, layer, batch, keys[:, :2], values[:, :2])
        outputs.append(jkv.attend(cache, layer, batch, queries))
    return jkv.commit(cache, batch), jnp.stack(outputs)


class TestDecodingGoesOn:
    """Attention before and after swapping is bit-identical."""

    @staticmethod
    def config(dtype, **changes):
        sizes = dict(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4)
        sizes |= dict(num_blocks=40, max_sequences=10, max_context_length=50)
        return jkv.CacheConfig(dtype=dtype, **(sizes | changes))

    @staticmethod
    @functools.cache
    def filled(dtype):
        """Return sequences of 17, 3, 30 and 8 random tokens, the last two forked."""
        cache = with_storage_filled(jkv.init(TestDecodingGoesOn.config(dtype)), np.nan)
        cache, _ = allocate(cache, [0, 0, 33, 0])
        lengths = np.array([17, 3, 30, 8], np.int32)
        cache, batch = jkv.append(cache, np.arange(4), lengths, capacity=58)
        rng = np.random.default_rng(1)
        for layer in range(2):
            rows = rng.standard_normal((2, 58, 2, 8)).astype(np.float32)
            cache = jkv.write(cache, layer, batch, *rows)
        return fork(jkv.commit(cache, batch), [2, 3])[0]

    def another(self, dtype):
        """Return a fragmented cache of other sizes, full of NaN."""
        cache = jkv.init(self.config(dtype, num_blocks=61, max_sequences=9))
        cache = with_storage_filled(cache, np.nan)
        cache, _ = allocate(cache, [50, 9, 50, 7])
        cache, _ = allocate(cache, 1)
        return free(cache, [3, 0, 2])[0]

    @pytest.mark.newest_further
    @pytest.mark.parametrize("dtype", few(DTYPES, jnp.bfloat16), ids=NAME)
    @pytest.mark.parametrize("donate", few([False, True], True))
    def test_in_another_cache(self, dtype, donate):
        cache = self.filled(dtype)
        seq_ids = [5, 2, 0, 4]
        expected = attended(cache, seq_ids, dtype)
        _, swapped = jkv.swap_out(cache, seq_ids)
        other, back = jkv.swap_in(self.another(dtype), swapped, donate=donate)
        jkv.check(other)
        jkv.raise_for_status(back)
        found = attended(other, back.seq_ids, dtype)
        assert np.isfinite(expected.astype(np.float32)).all()
        assert found.tobytes() == expected.tobytes()

    @pytest.mark.parametrize("dtype", DTYPES, ids=NAME)
    @pytest.mark.one_end
    def test_swap_in_into_the_same_cache(self, dtype):
        cache = self.filled(dtype)
        expected = attended(cache, [2, 0, 4], dtype)
        cache, swapped = jkv.swap_out(cache, 2)
        cache, _ = allocate(cache, [4, 4, 4, 0])  # takes its row
        cache, back = jkv.swap_in(cache, swapped)
        jkv.raise_for_status(back)
        seq_ids = [*back.seq_ids.tolist(), 0, 4]
        assert attended(cache, seq_ids, dtype).tobytes() == expected.tobytes()

    @pytest.mark.parametrize("fault", ["zeros", "length", "permuted"])
    @pytest.mark.one_end
    def test_the_comparison_can_fail(self, fault):
        cache = self.filled(jnp.float32)
        expected = attended(cache, [2], jnp.float32)
        _, swapped = jkv.swap_out(cache, 2)
        lengths, group = swapped.context_lengths, swapped.groups[0]
        if fault == "zeros":
            zeros = jax.tree.map(np.zeros_like, group.contents)
            group = dataclasses.replace(group, contents=zeros)
        elif fault == "length":
            lengths = lengths - 1
        else:
            tables = group.block_tables[:, [1, 0, *range(2, 13)]]
            group = dataclasses.replace(group, block_tables=tables)
        swapped = dataclasses.replace(swapped, context_lengths=lengths, groups=(group,))
        other, back = jkv.swap_in(self.another(jnp.float32), swapped)
        jkv.raise_for_status(back)
        found = attended(other, back.seq_ids, jnp.float32)
        assert found.tobytes() != expected.tobytes()


@pytest.mark.one_end
class TestRefusals:
    @pytest.mark.parametrize("seq_ids", [[3], [0, 0], [-2], [4], [0, 1, 2**31 - 1]])
    def test_closed_ids_raise_and_change_nothing(self, seq_ids):
        cache = opened(5, 9, 2)
        before = state(cache)
        with pytest.raises(jkv.InvalidSequence) as caught:
            jkv.swap_out(cache, seq_ids)
        assert caught.value.index == len(seq_ids) - 1
        assert state(cache) == before

    def refused(self, cache, swapped, status):
        before = without_refusals(cache)
        count = refusal_counts(cache)[status]
        after, back = jkv.swap_in(cache, swapped)
        assert back.status.tolist() == [status] * swapped.num_sequences
        assert back.seq_ids.tolist() == [-1] * swapped.num_sequences
        assert without_refusals(after) == before
        assert refusal_counts(after)[status] == count + swapped.num_sequences
        with pytest.raises(jkv.CacheError, match=status.name):
            jkv.raise_for_status(back, after)

    def test_all_or_nothing(self):
        _, two = jkv.swap_out(opened(9, 5), [0, 1])
        blocks, _ = allocate(small_cache(), [14])
        self.refused(blocks, two, jkv.Status.OUT_OF_BLOCKS)
        rows, _ = allocate(small_cache(), [0, 0, 0])
        self.refused(rows, two, jkv.Status.OUT_OF_SEQUENCES)
        short = small_cache(max_context_length=8)
        self.refused(short, two, jkv.Status.CONTEXT_FULL)

    def test_the_order_of_reasons(self):
        _, two = jkv.swap_out(opened(9, 5), [0, 1])
        full, _ = allocate(small_cache(), [14, 14, 0])
        self.refused(full, two, jkv.Status.OUT_OF_SEQUENCES)
        full, _ = allocate(small_cache(max_context_length=8), [8, 8, 8, 8])
        self.refused(full, two, jkv.Status.CONTEXT_FULL)

    def test_the_last_block_and_row_are_usable(self):
        _, two = jkv.swap_out(opened(9, 5), [0, 1])
        cache, _ = allocate(small_cache(), [12, 0])
        cache, back = jkv.swap_in(cache, two)
        jkv.check(cache)
        assert back.status.tolist() == [0, 0]
        assert free_count(cache) == 0

    def test_a_reservation_longer_than_the_tables(self):
        cache, _ = allocate(small_cache(), [13])
        _, swapped = jkv.swap_out(grow(cache, 0, range(5)), 0)
        short = small_cache(max_context_length=8)
        self.refused(short, swapped, jkv.Status.CONTEXT_FULL)

    @pytest.mark.parametrize(
        "changes",
        [
            dict(num_layers=2),
            dict(num_kv_heads=2),
            dict(head_dim=3),
            dict(value_head_dim=1),
            dict(block_size=2),
            dict(dtype=jnp.bfloat16),
            dict(dtype=jnp.float16),
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_a_cache_of_another_kind(self, changes):
        _, swapped = jkv.swap_out(opened(9), 0)
        with pytest.raises(ValueError, match="must have the layers"):
            jkv.swap_in(small_cache(**changes), swapped)


class TestTheHostValue:
    @pytest.mark.newest_further
    def test_pickle_and_repr(self):
        _, swapped = jkv.swap_out(opened(9, 5), [0, 1])
        copy = pickle.loads(pickle.dumps(swapped))
        assert repr(copy) == repr(swapped)
        assert "\n" not in repr(copy) and len(repr(copy)) < 88
        assert "2 sequences, 14 tokens, 5 of 5 blocks" in repr(copy)
        assert copy.nbytes == swapped.nbytes and copy.num_sequences == 2
        cache, back = jkv.swap_in(fragmented(), copy)
        assert stored_tokens(cache, int(back.seq_ids[0])) == list(range(9))

    @pytest.mark.one_end
    def test_it_is_frozen(self):
        _, swapped = jkv.swap_out(opened(9), 0)
        with pytest.raises(dataclasses.FrozenInstanceError):
            swapped.block_size = 1

    @pytest.mark.parametrize("dtype", few(DTYPES, jnp.bfloat16), ids=NAME)
    def test_pinned_memory(self, monkeypatch, dtype):
        """The path of an accelerator; a CPU also has pinned memory on request."""
        cache = opened(9, 14, num_layers=2, dtype=dtype)
        device = next(iter(cache.devices))
        if "pinned_host" not in {m.kind for m in device.addressable_memories()}:
            pytest.skip("no pinned memory")
        _, plain = jkv.swap_out(cache, [1, 0])
        monkeypatch.setattr(contents, "_has_pinned_memory", lambda _: True)
        cache, swapped = jkv.swap_out(cache, [1, 0])
        for array in jax.tree.leaves(swapped.groups[0].contents.storage):
            assert array.sharding.memory_kind == "pinned_host"
        assert swapped.nbytes == plain.nbytes
        copy = pickle.loads(pickle.dumps(swapped))
        for array in jax.tree.leaves(copy.groups[0].contents.storage):
            assert type(array) is np.ndarray
        for value in (swapped, copy):
            other, back = jkv.swap_in(fragmented(num_layers=2, dtype=dtype), value)
            pool = other.storage[0].key_pool
            assert pool.sharding.memory_kind != "pinned_host"
            first, second = back.seq_ids.tolist()
            assert stored_tokens(other, first) == list(range(100, 114))
            assert stored_tokens(other, second) == list(range(9))

    def test_pinned_memory_is_selected_if_the_device_has_it(self):
        """Never on a CPU."""

        class Memory:
            def __init__(self, kind):
                self.kind = kind

        class Device:
            def __init__(self, platform, *kinds):
                self.platform, self.kinds = platform, kinds

            def addressable_memories(self):
                return [Memory(kind) for kind in self.kinds]

        class Array:
            def __init__(self, *devices):
                self.devices = lambda: set(devices)

        gpu = Device("gpu", "device", "pinned_host")
        old = Device("rocm", "device")
        cpu = Device("cpu", "device", "pinned_host", "unpinned_host")
        chosen = [
            contents._has_pinned_memory(Array(*devices))
            for devices in ([gpu], [old], [cpu], [gpu, gpu], [gpu, old])
        ]
        assert chosen == [True, False, False, True, False]


@pytest.mark.one_end
class TestCost:
    def test_swap_in_donates_only_on_request(self):
        _, swapped = jkv.swap_out(opened(9), 0)
        cache = small_cache(record_tokens=True)
        before = state(cache)
        after, _ = jkv.swap_in(cache, swapped)
        assert state(cache) == before
        pools = jax.tree.leaves(after.storage)
        where = [pool.unsafe_buffer_pointer() for pool in pools]
        again, _ = jkv.swap_in(after, swapped, donate=True)
        assert all(pool.is_deleted() for pool in pools)
        pools = jax.tree.leaves(again.storage)
        assert [pool.unsafe_buffer_pointer() for pool in pools] == where
        jkv.check(again)

    def test_a_refused_donation_keeps_the_cache(self):
        _, swapped = jkv.swap_out(opened(9), 0)
        cache, _ = allocate(copied(small_cache()), [14, 14])
        after, back = jkv.swap_in(cache, swapped, donate=True)
        assert int(back.status[0]) == jkv.Status.OUT_OF_BLOCKS
        pool = cache.storage[0].key_pool
        assert not pool.is_deleted() and after.storage[0].key_pool is pool

    def test_all_sizes_share_a_few_programs(self):
        cache = small_cache(num_blocks=64, max_context_length=128, head_dim=3)
        cache = copied(cache)
        gathers = contents._gather_blocks._cache_size()
        scatters = contents._scatter._cache_size()
        for length in range(1, 128, 4):
            cache, result = allocate(cache, 0)
            cache, _ = jkv.append(cache, result.seq_ids, length, capacity=128)
            cache, swapped = jkv.swap_out(cache, result.seq_ids)
            assert swapped.num_filled_blocks == -(-length // 4)
            cache, back = jkv.swap_in(cache, swapped, donate=True)
            cache, _ = free(cache, back.seq_ids)
        assert contents._gather_blocks._cache_size() - gathers == 6
        assert contents._scatter._cache_size() - scatters == 6


@pytest.mark.one_end
class TestWithAPrefixIndex:
    def computed(self, cache, prompt, salt):
        """Compute a prompt's uncached tokens; return (cache, seq_id, found)."""
        cache, opened = allocate(cache, 0, tokens=[prompt], salts=salt)
        jkv.raise_for_status(opened)
        rest = prompt[int(opened.num_cached[0]) :]
        cache, step = append(cache, opened.seq_ids, len(rest), tokens=rest)
        cache = write_tokens(cache, step, rest)
        return cache, int(opened.seq_ids[0]), int(opened.num_cached[0])

    def test_salt_and_tokens_are_moved(self):
        cache = small_cache(prefix_caching=True)
        cache, seq_id, _ = self.computed(cache, list(range(40, 49)), 7)
        cache, swapped = jkv.swap_out(cache, seq_id)
        other = small_cache(prefix_caching=True)
        other, _, _ = self.computed(other, [1, 2, 3], 5)
        other, back = jkv.swap_in(other, swapped)
        jkv.check(other)
        seq_id, index = int(back.seq_ids[0]), other.metadata.index
        assert int(index.sequence_salts[seq_id]) == 7
        created = other.metadata.sequences.created
        assert int(index.epochs[seq_id]) == int(created[seq_id])
        assert jkv.tokens(other, seq_id)[:9].tolist() == list(range(40, 49))
        assert stored_tokens(other, seq_id) == list(range(40, 49))

    def test_swapped_out_prefixes_stay_cached(self):
        """They are found until evicted; the restored sequence adds no entry."""
        cache = small_cache(prefix_caching=True)
        prompt = list(range(40, 49))
        cache, seq_id, _ = self.computed(cache, prompt, 7)
        cache, swapped = jkv.swap_out(cache, seq_id)
        jkv.check(cache)
        assert match(cache, [prompt], 7) == [8]
        cache, seq_id, found = self.computed(cache, prompt, 7)
        assert found == 8
        cache, _ = free(cache, seq_id)
        cache, back = jkv.swap_in(cache, swapped)
        jkv.check(cache)
        (seq_id,) = back.seq_ids.tolist()
        assert int(cache.metadata.index.committed[seq_id]) == -1
        cache = grow(cache, seq_id, [49, 50, 51])
        jkv.check(cache)
        assert stored_tokens(cache, seq_id) == list(range(40, 52))
        assert match(cache, [range(40, 53)], 7) == [8]
        # Nor after swapping again.
        cache, swapped = jkv.swap_out(cache, seq_id)
        cache, back = jkv.swap_in(cache, swapped)
        assert int(cache.metadata.index.committed[int(back.seq_ids[0])]) == -1

    def test_holes_in_the_ring(self):
        """Cached blocks that were hit left the ring, so none of them is taken."""
        _, swapped = jkv.swap_out(opened(9, prefix_caching=True), 0)
        cache, prompt = small_cache(prefix_caching=True), list(range(9))
        cache, seq_id, _ = self.computed(cache, prompt, 0)  # blocks 0 1 2
        cache, _ = free(cache, seq_id)
        cache, reserved = allocate(cache, [14, 4])  # all others
        cache, opened_again = allocate(cache, 0, tokens=[prompt])
        seq_id = int(opened_again.seq_ids[0])
        assert table(cache, seq_id) == [0, 1]
        cache, _ = free(cache, reserved.seq_ids[:1])
        ring = cache.metadata.groups[0].free_blocks  # 2, two holes, 6 5 4 3
        assert (int(ring.span), int(ring.count)) == (7, 5)
        cache, back = jkv.swap_in(cache, swapped)
        jkv.check(cache)
        assert table(cache, int(back.seq_ids[0])) == [2, 6, 5]
        assert stored_tokens(cache, int(back.seq_ids[0])) == prompt
        assert stored_tokens(cache, seq_id) == prompt[:8]

    def test_cached_blocks_are_evicted(self):
        """The oldest are evicted, and each is counted once."""
        plain = opened(9, prefix_caching=True)
        plain, _ = fork(plain, [0, 0])
        _, swapped = jkv.swap_out(plain, [0, 1, 2])
        cache = small_cache(prefix_caching=True)
        for salt in range(2):
            cache, seq_id, _ = self.computed(cache, list(range(14)), salt)
            cache, _ = free(cache, seq_id)
        cache, back = jkv.swap_in(cache, swapped)
        jkv.check(cache)
        jkv.raise_for_status(back)
        # Five blocks: an uncommitted tail, three of the first prompt, and another tail.
        free_blocks = cache.metadata.groups[0].free_blocks
        assert free_blocks.num_forgotten.tolist() == [3, 0]
        for seq_id in back.seq_ids.tolist():
            assert stored_tokens(cache, seq_id) == list(range(9))


@pytest.mark.one_end
def test_groups_in_another_order_are_refused():
    """A group of blocks cannot become a group of states."""
    sizes = dict(max_sequences=2, max_context_length=16, block_size=4)
    blocks = jkv.CacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=4, **sizes
    )
    states = jkv.StateConfig(num_layers=1, arrays={"s": ((2,), "float32")}, **sizes)
    first, second = (
        jkv.init(jkv.GroupedConfig(groups=groups, layer_groups=(0, 1)))
        for groups in ((blocks, states), (states, blocks))
    )
    first, opened = jkv.allocate(first, [0])
    _, swapped = jkv.swap_out(first, opened.seq_ids)
    words = "one group of layers with blocks, then one .* states, .* got one"
    with pytest.raises(jkv.UsageError, match=words):
        jkv.swap_in(second, swapped)

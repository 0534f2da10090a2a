"""Saving, swapping and resizing caches of two groups of layers.

Layers 0 and 2 have a window of eight tokens, layer 1 has full attention: the second
group leads, and the first releases blocks. The groups differ in head dim and dtype.
Token t is stored as the key 100 * layer + t, and as minus that, as a value. All else is
NaN.
"""

import dataclasses
import functools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from support.jax_versions import further
from support.small_caches import assert_unchanged, with_storage_filled

import jkv
from jkv.status import UsageError

pytestmark = pytest.mark.one_end

WINDOW, LAYERS, WIDTH, ROWS = 8, (0, 1, 0), 3, 24
SIZES = dict(
    num_kv_heads=1, block_size=4, max_sequences=4, max_context_length=24, num_blocks=12
)
A, B = list(range(1, 15)), [*range(1, 9), *range(51, 57)]


def make_config(windowed=9, full=12, prefix_caching=True, **of_windowed):
    """Return two layers with a window and one without."""
    sizes = dict(num_layers=2, head_dim=3, dtype="float16", sliding_window=WINDOW)
    sizes = SIZES | sizes | dict(num_blocks=windowed) | of_windowed
    everything = SIZES | dict(num_blocks=full)
    return jkv.GroupedConfig(
        groups=(
            jkv.CacheConfig(**sizes),
            jkv.CacheConfig(num_layers=1, head_dim=2, dtype="float32", **everything),
        ),
        layer_groups=LAYERS,
        prefix_caching=prefix_caching,
    )


@functools.cache
def fresh(**changes):
    """Create a cache full of NaN."""
    return with_storage_filled(jkv.init(make_config(**changes)), np.nan)


@jax.jit
def step(cache, seq_ids, counts, tokens):
    """Append tokens, i32[ROWS], and write them in all layers."""
    recorded = None if cache.metadata.tokens is None else tokens
    cache, batch = jkv.append(cache, seq_ids, counts, capacity=ROWS, tokens=recorded)
    for layer, group in enumerate(LAYERS):
        numbers = (tokens + 100 * layer).astype(jnp.float32)[:, None, None]
        rows = jnp.broadcast_to(numbers, (ROWS, 1, cache.storage[group].head_dim))
        cache = jkv.write(cache, layer, batch, rows, -rows)
    return jkv.commit(cache, batch), batch.status


@jax.jit
def allocate(cache, tokens):
    """Open a sequence for the first of the prompts, i32[WIDTH, ROWS]."""
    counts = jnp.array([0, -1, -1])
    if cache.metadata.tokens is None:
        return jkv.allocate(cache, counts)
    return jkv.allocate(cache, counts, tokens=tokens)


@jax.jit
def read_all(cache):
    """Return keys, values and length of all sequences in each layer."""
    ids = jnp.arange(cache.max_sequences, dtype=jnp.int32)
    layers = range(len(LAYERS))
    return [jax.vmap(functools.partial(jkv.read, cache, i))(ids) for i in layers]


def padded(rows):
    return np.array([[*row, *[-1] * (ROWS - len(row))] for row in rows], np.int32)


def write_sequence(cache, seq_id, sequence):
    """Append tokens to one sequence."""
    if not sequence:
        return cache
    ids, counts = np.int32([seq_id, -1, -1]), np.int32([len(sequence), 0, 0])
    cache, status = step(cache, ids, counts, padded([sequence])[0])
    jkv.raise_for_status(status)
    return cache


def find_sequence(cache, sequence):
    """Open a sequence for a prompt; return its id and the number of cached tokens."""
    nobody = [[]] * (WIDTH - 1)
    cache, opened = allocate(cache, padded([sequence, *nobody]))
    jkv.raise_for_status(opened)
    seq_id = int(opened.seq_ids[0])
    found = 0 if opened.num_cached is None else int(opened.num_cached[0])
    return cache, seq_id, found


def open_sequence(cache, sequence):
    """Open a sequence for a prompt and compute its uncached tokens."""
    cache, seq_id, found = find_sequence(cache, sequence)
    return write_sequence(cache, seq_id, sequence[found:]), seq_id, found


@functools.cache
def busy(**changes):
    """Return three sequences, two with shared blocks; some of the first are released.

    One was freed; reopening its cached part left holes in the rings.
    """
    cache, _, _ = open_sequence(fresh(**changes), A)
    cache, other, _ = open_sequence(cache, B)
    cache = write_sequence(cache, 0, [15, 16, 17])
    cache, _ = jkv.fork(cache, [0])
    cache, _ = jkv.free(cache, [other])
    cache, again, found = find_sequence(cache, B[:13])
    cache = write_sequence(cache, again, B[found:12])
    cache = write_sequence(cache, 0, [18])
    jkv.check(cache)
    return cache


def assert_stored(cache, sequences):
    """Assert that sequences hold these tokens, except released ones."""
    found = jax.device_get(read_all(cache))
    for seq_id, sequence in sequences.items():
        for layer, (keys, values, lengths) in enumerate(found):
            assert lengths[seq_id] == len(sequence)
            first = max(len(sequence) + 1 - WINDOW, 0) if LAYERS[layer] == 0 else 0
            expected = np.array(sequence[first:]) + 100 * layer
            kept = slice(first, len(sequence))
            assert (keys[seq_id, kept, 0].T == expected).all()
            assert (values[seq_id, kept, 0].T == -expected).all()


SEQUENCES = {0: [*A, 15, 16, 17, 18], 2: [*A, 15, 16, 17], 3: B[:12]}


def assert_same(found, expected):
    """Assert bit-identical leaves, and equal static fields, dtypes and shapes."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def found_of(cache, *sequences):
    """Return the number of cached tokens of each sequence with one more token."""
    longer = [[*sequence, 99] for sequence in sequences] + [[]] * (
        WIDTH - len(sequences)
    )
    return jkv.match(cache, padded(longer)).tolist()[: len(sequences)]


def test_the_cache_shared_by_these_tests():
    cache = busy()
    assert cache.metadata.leader == 1
    assert_stored(cache, SEQUENCES)
    gaps = [group.window.gaps_of(jnp.arange(4)) for group in cache.metadata.groups]
    assert int(gaps[0][0]) > 0 and gaps[1] == 0
    rings = [group.free_blocks for group in cache.metadata.groups]
    assert all(int(ring.span) > int(ring.count) for ring in rings)
    assert found_of(cache, A, B) == [14, 12]
    with pytest.raises(AssertionError):
        assert_stored(cache, SEQUENCES | {2: SEQUENCES[0]})


class TestFiles:
    @pytest.mark.parametrize("prefix_caching", [False, True])
    def test_a_whole_cache_is_one_file(self, tmp_path, prefix_caching):
        cache = busy(prefix_caching=prefix_caching)
        jkv.save(tmp_path / "cache", cache)
        loaded = jkv.load(tmp_path / "cache")
        jkv.check(loaded)
        assert_same(loaded, cache)
        assert repr(loaded) == repr(cache)
        assert_stored(write_sequence(loaded, 3, [7]), {3: [*B[:12], 7]})

    def test_files_record_groups_and_constants(self, tmp_path):
        cache = busy()
        jkv.save(tmp_path / "cache", cache)
        with safetensors.safe_open(tmp_path / "cache", framework="np") as file:
            constants = json.loads(file.metadata()["fields"])
            assert constants["layer_groups"] == [[0], [1], [0]]
            dtypes = [constants[f"storage.{number}.dtype"] for number in (0, 1)]
            assert dtypes == ["float16", "float32"]
            assert constants["metadata.groups.0.window.length"] == WINDOW
            assert not any(
                name.startswith("metadata.groups.1.window")
                for name in [*constants, *file.keys()]
            )
            partners = file.get_tensor("metadata.index.followers.0.partners")
            (follower,) = cache.metadata.index.followers
            np.testing.assert_array_equal(partners, follower.partners)

    def test_a_cache_in_debug_mode_is_saved_without_it(self, tmp_path):
        cache = busy()
        jkv.save(tmp_path / "cache", jkv.debug(cache))
        assert_same(jkv.load(tmp_path / "cache"), cache)

    def test_sequences_are_loaded_beside_open_ones(self, tmp_path):
        jkv.save(tmp_path / "some", busy(), [2, -1, 0])
        other, _ = jkv.free(busy(), [0, 2])
        other, back = jkv.load(tmp_path / "some", other)
        jkv.check(other)
        jkv.raise_for_status(back)
        third, first = back.seq_ids.tolist()
        sequences = {third: SEQUENCES[2], first: SEQUENCES[0], 3: SEQUENCES[3]}
        assert_stored(other, sequences)

    def test_all_sequences_of_a_whole_cache(self, tmp_path):
        jkv.save(tmp_path / "cache", busy())
        other, back = jkv.load(tmp_path / "cache", fresh())
        jkv.check(other)
        ids = back.seq_ids.tolist()
        assert_stored(other, dict(zip(ids, SEQUENCES.values(), strict=True)))


class TestSwapping:
    def test_swap_out_and_in(self):
        cache = busy()
        left, swapped = jkv.swap_out(cache, [0, 2])
        jkv.check(left)
        assert_stored(left, {3: SEQUENCES[3]})
        back, entered = jkv.swap_in(left, swapped)
        jkv.check(back)
        first, third = entered.seq_ids.tolist()
        assert_stored(back, {first: SEQUENCES[0], 3: SEQUENCES[3], third: SEQUENCES[2]})
        for was, now in zip(cache.metadata.groups, back.metadata.groups, strict=True):
            ids, others = jnp.array([0, 2]), entered.seq_ids
            np.testing.assert_array_equal(
                was.window.gaps_of(ids), now.window.gaps_of(others)
            )
            assert int(jnp.sum(was.num_kept_blocks)) == int(
                jnp.sum(now.num_kept_blocks)
            )
        # Both still share the same blocks, in each group.
        for group in swapped.groups:
            kept = group.block_tables[group.block_tables < group.num_blocks]
            assert len(np.unique(kept)) == group.num_blocks < len(kept)

    def test_tokens_are_those_of_the_leading_group(self):
        _, swapped = jkv.swap_out(busy(), 3)
        windowed, full = swapped.groups
        assert windowed.contents.tokens is None
        assert full.contents.tokens.ravel().tolist() == B[:12]
        assert (windowed.dtype, full.dtype) == (jnp.float16, jnp.float32)
        copy = pickle.loads(pickle.dumps(swapped))
        assert "2 of 2 and 3 of 3 blocks" in repr(copy)
        cache, back = jkv.swap_in(fresh(), copy)
        assert_stored(cache, {int(back.seq_ids[0]): B[:12]})
        assert jkv.tokens(cache, back.seq_ids[0])[:12].tolist() == B[:12]

    @pytest.mark.parametrize("sizes", [(1, 12), (9, 2)])
    def test_all_groups_or_none(self, sizes):
        """Either pool may be too small, while the other one suffices."""
        _, swapped = jkv.swap_out(busy(), 3)
        small = jkv.resize(fresh(), sizes)
        after, refused = jkv.swap_in(small, swapped)
        assert refused.seq_ids.tolist() == [-1]
        assert refused.status.tolist() == [jkv.Status.OUT_OF_BLOCKS]
        assert_unchanged(small, after)
        jkv.check(after)
        served, back = jkv.swap_in(jkv.resize(small, (2, 3)), swapped)
        assert_stored(served, {int(back.seq_ids[0]): B[:12]})

    def test_mismatched_groups_are_refused(self):
        _, swapped = jkv.swap_out(busy(), 0)
        plain = jkv.init(make_config().groups[1])
        with pytest.raises(UsageError, match="must have 2 groups .* got one"):
            jkv.swap_in(plain, swapped)
        with pytest.raises(ValueError, match="group 0: dtype is float16, .* bfloat16"):
            jkv.swap_in(jkv.init(make_config(dtype="bfloat16")), swapped)
        with pytest.raises(ValueError, match="lack tokens inside"):
            jkv.swap_in(jkv.init(make_config(sliding_window=20)), swapped)


class TestNewPools:
    def test_compact(self):
        cache = busy()
        compacted = jkv.compact(cache)
        jkv.check(compacted)
        assert_stored(compacted, SEQUENCES)
        assert found_of(compacted, A, B) == found_of(cache, A, B)
        assert jkv.stats(compacted).compactions == 1
        for group in compacted.metadata.groups:
            live = np.asarray(group.reference_counts) > 0
            assert live[: live.sum()].all()

    @pytest.mark.parametrize(
        "windowed, full", [(9, 20), (8, 12), *further([(20, 12), (9, 8)])]
    )
    def test_one_pool_of_two(self, windowed, full):
        cache, sizes = busy(), (windowed, full)
        resized = jkv.resize(cache, sizes)
        jkv.check(resized)
        assert_stored(resized, SEQUENCES)
        assert [group.num_blocks for group in resized.metadata.groups] == [*sizes]
        changed = sizes.index(next(n for n in sizes if n not in (9, 12)))
        assert resized.storage[1 - changed] is cache.storage[1 - changed]
        # A prefix cache hit has the right contents: the sequence continues from there.
        resized, _ = jkv.free(resized, [0])
        for sequence in ([*A, 77], [*B, 77]):
            (expected,) = found_of(resized, sequence[:-1])
            again, seq_id, found = open_sequence(resized, sequence)
            assert found == expected
            jkv.check(again)
            assert_stored(again, {seq_id: sequence})

    def test_the_oldest_cached_blocks_of_a_group_are_evicted_first(self):
        cache, _ = jkv.free(busy(), list(SEQUENCES))
        known = jkv.stats(cache).groups[0].cached_blocks
        assert known > 3
        smaller = jkv.resize(cache, (3, 12))
        jkv.check(smaller)
        assert jkv.stats(smaller).groups[0].cached_blocks == 3
        forgotten = [
            int(each.metadata.groups[0].free_blocks.num_forgotten[0])
            for each in (cache, smaller)
        ]
        assert forgotten[1] - forgotten[0] == known - 3

    def test_invalid_sizes_are_refused(self):
        cache = busy()
        with pytest.raises(UsageError, match="one number for each of 2 groups"):
            jkv.resize(cache, 12)
        with pytest.raises(ValueError, match="live blocks of group 1 do not fit"):
            jkv.resize(cache, (20, 3))
        with pytest.raises(ValueError, match="num_blocks"):
            jkv.resize(cache, (20, 0))


def test_groups_are_distinguishable_in_assertions():
    """`assert_same` and `assert_stored` fail if groups are swapped."""
    cache = busy()
    first, second = cache.metadata.groups
    metadata = dataclasses.replace(cache.metadata, groups=(second, first))
    with pytest.raises(AssertionError):
        assert_same(cache.with_metadata(metadata), cache)
    zeros = with_storage_filled(cache, 0.0)
    with pytest.raises(AssertionError):
        assert_stored(zeros, SEQUENCES)

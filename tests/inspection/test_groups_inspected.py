"""check, stats, memory_profile and debug mode of a cache with two groups of layers.

Group 0 has full attention, group 1 a window of 8; layer 0 is in group 1.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import further
from support.models.windowed_model import EMBEDDING, PROMPTS, grouped_cache, mixed_model
from support.small_caches import with_metadata

import jkv

pytestmark = pytest.mark.one_end

SEQUENCE = list(range(1, 21))


def run(cache, sequence, seq_id=0):
    """Take a valid step of one sequence; all its tokens are known."""
    tokens = np.array([*sequence, *[0] * (20 - len(sequence))], np.int32)
    cache, batch = jkv.append(
        cache, [seq_id], len(sequence), capacity=20, tokens=tokens
    )
    jkv.raise_for_status(batch)
    _, cache = mixed_model(EMBEDDING, tokens, cache, batch)
    return jkv.commit(cache, batch)


@functools.cache
def lived(prefix_caching=True):
    """Return a sequence of 26 tokens that released blocks of group 1, and its fork."""
    cache, opened = jkv.allocate(grouped_cache(prefix_caching=prefix_caching), [0])
    jkv.raise_for_status(opened)
    cache = run(run(cache, SEQUENCE), [21, 22, 23, 24, 25, 26])
    cache, forked = jkv.fork(cache, 0)
    jkv.raise_for_status(forked)
    return cache


def changed(array, index, value):
    copy = np.array(array)
    copy[index] = value
    return copy


def assert_found(cache, message):
    with pytest.raises(jkv.InvariantError, match=message):
        jkv.check(cache)


@pytest.mark.parametrize("prefix_caching", [True, *further([False])])
def test_a_valid_cache_passes(prefix_caching):
    cache = lived(prefix_caching)
    jkv.check(cache)
    assert jkv.kept_from(cache).tolist()[:2] == [12, 12]
    cache, _ = jkv.free(cache, [0, 1])
    jkv.check(cache)


@pytest.mark.parametrize(
    "name, index, value, invariant",
    [
        ("reference_counts", 6, 5, "reference_counts"),
        ("num_mapped_blocks", 0, 6, "block_tables"),  # one more is mapped
        ("num_mapped_blocks", 7, 1, "block_tables"),
        ("block_tables", (0, 0), 0, "block_tables"),  # of a released column
        ("block_tables", (0, 4), 19, "reference_counts"),
    ],
)
def test_a_fault_names_its_group(name, index, value, invariant):
    cache = lived()
    wrong = changed(getattr(cache.metadata.groups[1], name), index, value)
    cache = with_metadata(cache, group=1, **{name: wrong})
    assert_found(cache, f"^{invariant}: group 1: ")


def test_blocks_in_the_window_must_be_mapped():
    cache = lived()
    group = cache.metadata.groups[1]
    window = group.window
    gone = changed(window.num_released, [0, 1], 5)
    window = dataclasses.replace(window, num_released=jnp.asarray(gone))
    blocks = np.array(group.block_tables)
    missing = set(blocks[:2, 3:5].reshape(-1).tolist())
    blocks[:2, 3:5] = group.num_blocks
    counts = changed(group.reference_counts, sorted(missing), 0)
    ring = group.free_blocks
    # The unmapped blocks enter the ring, as if they had been freed.
    head, span = ring.bounds[:2].tolist()
    spots = (head + span + np.arange(len(missing))) % ring.ids.shape[0]
    bounds = np.array(ring.bounds)
    bounds[1:3] += len(missing)
    ring = dataclasses.replace(
        ring,
        ids=jnp.asarray(changed(ring.ids, spots, sorted(missing))),
        indices=jnp.asarray(changed(ring.indices, sorted(missing), spots)),
        bounds=jnp.asarray(bounds),
    )
    cache = with_metadata(
        cache,
        group=1,
        window=window,
        block_tables=blocks,
        reference_counts=counts,
        free_blocks=ring,
    )
    assert_found(cache, "^released: group 1: row 0 keeps tokens from 20 on")


def test_the_ring_of_a_group():
    cache = lived()
    ring = cache.metadata.groups[1].free_blocks
    places = changed(ring.indices, ring.ids[int(ring.head)], -1)
    ring = dataclasses.replace(ring, indices=jnp.asarray(places))
    assert_found(
        with_metadata(cache, group=1, free_blocks=ring), "free_blocks: group 1"
    )


class TestBeside:
    """Indexed blocks of other groups match the leading group's sequences."""

    def with_beside(self, cache, **changes):
        (beside,) = cache.metadata.index.followers
        changes = {name: jnp.asarray(array) for name, array in changes.items()}
        beside = dataclasses.replace(beside, **changes)
        index = dataclasses.replace(cache.metadata.index, followers=(beside,))
        return with_metadata(cache, index=index)

    def columns(self, cache, *columns):
        """Return the blocks of sequence 0 in some columns, of each group."""
        groups = cache.metadata.groups
        return [[int(g.block_tables[0, c]) for c in columns] for g in groups]

    @pytest.mark.parametrize("name", ["partners", "beside"])
    @pytest.mark.parametrize("value", [-1, 99])
    def test_names_blocks(self, name, value):
        cache = lived()
        (beside,) = cache.metadata.index.followers
        wrong = changed(getattr(beside, name), 3, value)
        cache = self.with_beside(cache, **{name: wrong})
        assert_found(cache, "^prefix_index: group 1: .* not a block")

    def test_is_not_another_column(self):
        cache = lived()
        leading, own = self.columns(cache, 3, 4)
        (beside,) = cache.metadata.index.followers
        assert beside.partners[jnp.array(leading)].tolist() == own
        cache = self.with_beside(
            cache,
            partners=changed(beside.partners, leading, own[::-1]),
            beside=changed(beside.beside, own, leading[::-1]),
        )
        assert_found(cache, "group 1: row 0 pairs block .* with .*, the index with")

    def test_one_sided_block_pairs_are_reported(self):
        cache = lived()
        leading, own = self.columns(cache, 3, 4)
        (beside,) = cache.metadata.index.followers
        for changes in (
            dict(partners=changed(beside.partners, leading, own[::-1])),
            dict(beside=changed(beside.beside, own, leading[::-1])),
        ):
            jkv.check(self.with_beside(cache, **changes))

    def test_is_not_written_again(self):
        cache = lived()
        (leading, _), (_, tail) = self.columns(cache, 4, 6)
        (beside,) = cache.metadata.index.followers
        cache = self.with_beside(
            cache,
            partners=changed(beside.partners, leading, tail),
            beside=changed(beside.beside, tail, leading),
        )
        assert_found(cache, "group 1: row 0 has a cached block .* that is writable")


def test_the_shapes_of_a_group():
    cache = lived()
    pool = cache.storage[1].value_pool[:, :19]
    wrong = dataclasses.replace(cache.storage[1], value_pool=pool)
    message = r"^shapes: storage\.1\.value_pool is float32\[1, 19, 1, 4, 6\], expected"
    assert_found(cache.with_group_storage(1, wrong), message)


def recount(cache, number):
    """Return a group's statistics, counted entry by entry in plain Python."""
    group = cache.metadata.groups[number]
    entries = [
        b for b in group.block_tables.reshape(-1).tolist() if b < group.num_blocks
    ]
    owners = [entries.count(block) for block in range(group.num_blocks)]
    return dict(
        total_blocks=group.num_blocks,
        live_blocks=sum(n > 0 for n in owners),
        free_blocks=sum(n == 0 for n in owners),
        shared_blocks=sum(n > 1 for n in owners),
    )


def test_stats_of_groups_and_of_all():
    cache, _ = jkv.free(lived(), 0)
    stats = jkv.stats(cache)
    for number, group in enumerate(stats.groups):
        for name, value in recount(cache, number).items():
            assert getattr(group, name) == value, name
    for field in dataclasses.fields(jkv.stats(cache).groups[0]):
        total = sum(getattr(group, field.name) for group in stats.groups)
        assert getattr(stats, field.name) == total, field.name
    full, windowed = stats.groups
    # 26 tokens in 7 blocks, and a copy of the tail for the fork.
    assert full.allocations == windowed.allocations == 8
    assert (full.live_blocks, full.pinned_blocks, full.cached_blocks) == (7, 6, 0)
    # Columns 0 to 2 were released and are still indexed.
    assert (windowed.live_blocks, windowed.pinned_blocks) == (4, 3)
    assert windowed.cached_blocks == 3 and stats.tokens == 26


def test_stats_print_in_a_few_lines():
    lines = str(jkv.stats(lived())).splitlines()
    assert lines[0].startswith("blocks      13 of 64 live")
    assert lines[2] == "  group 0    8 of 44 live (18%), 0 cached, at the peak 8 live"
    assert lines[3].startswith("  group 1    5 of 20 live (25%), 3 cached")
    assert len(lines) < 14 and max(map(len, lines)) < 88


def test_memory_covers_all_groups():
    cache = lived()
    profile = jkv.memory_profile(cache)
    leaves = jax.tree.leaves((cache.metadata, cache.storage))
    assert profile.total_bytes == cache.nbytes == sum(leaf.nbytes for leaf in leaves)
    # A token has 6 keys and 6 values in a layer of each group, a block 4 tokens.
    assert profile.bytes_per_token == 2 * 12 * 4
    assert profile.storage_bytes == (44 + 20) * 4 * 12 * 4
    assert profile.used_bytes == (8 + 5) * 4 * 12 * 4
    assert profile.used_bytes + profile.free_bytes == profile.storage_bytes
    # Shared blocks count once: 26 tokens and the copied tail of 2; and 14 and 2.
    assert (profile.tokens, profile.cells) == (28 + 16, 13 * 4)
    assert "storage.1.key_pool" in profile.report()


def test_fragmentation_covers_all_groups():
    cache, opened = jkv.allocate(grouped_cache(), [40, 4])
    cache, _ = jkv.free(cache, 0)
    found = jkv.fragmentation(cache)
    full, windowed = (cache.metadata.groups[i].block_tables[1, 0] for i in (0, 1))
    assert windowed < full and int(full) == 10
    assert found.spread == pytest.approx(10 / 11) and found.sharing == 1.0
    assert found.internal == 1.0  # both blocks are reserved
    assert jkv.should_compact(cache)


class TestDebugMode:
    """Faults are also detected with several groups."""

    def watched(self, prefix_caching=False):
        cache = jkv.debug(grouped_cache(prefix_caching=prefix_caching))
        cache, opened = jkv.allocate(cache, [0, 0])
        jkv.raise_for_status(opened)
        return cache

    def rows(self, batch):
        return jnp.ones((batch.num_rows, 1, 6), jnp.float32)

    def findings(self, cache):
        """Return the findings of `check`; eager steps may copy the pools."""
        try:
            jkv.check(cache)
        except jkv.DebugError as error:
            return [text for text in error.findings if "not donated" not in text]
        return []

    def test_a_valid_program_has_no_findings(self):
        cache = self.watched(prefix_caching=True)
        cache = run(run(cache, SEQUENCE), [3, 1])
        cache, status = jkv.truncate(cache, 0, 21)
        jkv.raise_for_status(status)
        assert self.findings(cache) == []
        assert jkv.debug(cache, enabled=False).interceptor is None

    @pytest.mark.further  # a step of groups is above, a loop in test_debugging.py
    def test_a_generation(self):
        cache = jkv.debug(grouped_cache(prefix_caching=True))
        params = jnp.asarray(EMBEDDING)
        generate = jax.jit(
            lambda cache: jkv.generate(
                mixed_model, params, cache, PROMPTS, max_new_tokens=6, row_counts=(4,)
            ),
            donate_argnums=0,
        )
        cache, _ = generate(jax.tree.map(jnp.copy, cache))
        assert self.findings(cache) == []

    @pytest.mark.parametrize("layer", [0, 1])
    def test_attending_before_writing(self, layer):
        cache, batch = jkv.append(self.watched(), [0])
        rows = self.rows(batch)
        cache = jkv.write(cache, 1 - layer, batch, rows, rows)
        jkv.attend(cache, layer, batch, rows, window=None if layer else 8)
        (finding,) = self.findings(cache)
        assert f"attend reads layer {layer} before this step" in finding

    def test_an_invalid_traced_layer(self):
        cache = self.watched()

        @functools.partial(jax.jit, donate_argnums=0)
        def wrong(cache, period):
            cache, batch = jkv.append(cache, [0])
            layer = cache.find_periodic(1, 2, period)
            rows = self.rows(batch)
            return jkv.write(cache, layer, batch, rows, rows), batch.status

        cache, _ = wrong(cache, jnp.int32(0))
        jkv.check(cache)
        cache, _ = wrong(cache, jnp.int32(1))
        # The previous step wrote only one layer.
        unwritten, finding = sorted(self.findings(cache))
        assert "written to all layers" in unwritten
        assert "a layer that does not exist: there are 1 in group 0" in finding

    def test_a_commit_before_all_layers_are_written(self):
        cache = self.watched(prefix_caching=True)
        cache, batch = jkv.append(cache, [0], tokens=[5])
        rows = self.rows(batch)
        cache = jkv.commit(jkv.write(cache, 0, batch, rows, rows), batch)
        (finding,) = self.findings(cache)
        assert "written to all layers" in finding

    def test_an_undonated_pool_of_one_group(self):
        cache = self.watched()
        storage = jax.tree.map(lambda pool: pool + 1, cache.storage[1])
        with pytest.raises(jkv.DebugError, match="was not donated"):
            jkv.check(cache.with_group_storage(1, storage))

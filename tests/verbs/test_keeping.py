"""Tests of retention priorities: eviction order, demotion and deadlines.

The random tests predict a block's priority after any calls
(`support/caches/keeping.py`); here each rule is tested alone.
"""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.caches import random_operations
from support.caches.keeping import KeepingGame, KeepingSpillGame, make_keeping_verbs
from support.caches.random_operations import GROUPED, SHAPES
from support.jax_versions import further
from support.small_caches import (
    allocate,
    append,
    ring_order,
    small_cache,
    with_metadata,
    write_tokens,
)
from test_compaction import ResizingGame
from test_random_operations import EFFORT

import jkv
from jkv.status import Status

pytestmark = pytest.mark.one_end
A, B, C = range(100, 109), range(200, 209), range(300, 309)  # two blocks and a token


def fresh():
    return small_cache(prefix_caching=True, keep_classes=3)


def played(cache, tokens, keep=0, until=None):
    """Return the cache after computing a sequence and freeing it with a priority."""
    cache, opened = allocate(cache, 0, tokens=[[*tokens]])
    (seq_id,), (found,) = opened.seq_ids.tolist(), opened.num_cached.tolist()
    rest = [*tokens][found:]
    cache, step = append(cache, seq_id, len(rest), tokens=rest)
    cache = write_tokens(cache, step, rest)
    cache, status = free_by(cache, [seq_id], [keep], None if until is None else [until])
    assert status == [Status.OK]
    return cache


def free_by(cache, seq_ids, keep, until=None):
    """Call `jkv.free` with four requests."""
    padding = [0] * (4 - len(keep))
    cache, status = jkv.free(
        cache,
        np.array([*seq_ids, *[-1] * (4 - len(seq_ids))], np.int32),
        keep=np.array([*keep, *padding], np.int32),
        keep_until=None if until is None else np.array([*until, *padding], np.uint32),
    )
    jkv.check(cache)
    return cache, status.tolist()[: len(keep)]


def found(cache, *sequences):
    """Return the number of cached tokens of sequences."""
    rows = np.full((4, 16), -1, np.int32)
    for row, sequence in zip(rows, sequences, strict=False):
        row[: len(sequence)] = sequence
    return jkv.match(cache, rows).tolist()[: len(sequences)]


def pressed(cache, num_blocks):
    """Return the cache after other sequences used `num_blocks` blocks."""
    counts = [min(3, num_blocks - start) * 4 for start in range(0, num_blocks, 3)]
    cache, opened = allocate(cache, counts)
    return free_by(cache, opened.seq_ids, [0] * len(opened.seq_ids))[0]


def test_lower_priorities_are_evicted_first_each_in_lru_order():
    cache = played(played(fresh(), A, keep=2), B, keep=1)
    # Unindexed blocks, the third of A and of B, have priority 0.
    assert ring_order(cache)[:4] == [6, 7, 2, 5]
    assert found(pressed(cache, 5), A, B) == [8, 4]
    assert found(pressed(cache, 6), A, B) == [8, 0]
    assert found(pressed(cache, 7), A, B) == [4, 0]


def test_a_block_keeps_its_highest_priority_after_a_hit():
    cache = played(played(fresh(), A, keep=1), B)
    cache = played(cache, A, keep=0)
    assert found(pressed(cache, 6), A, B) == [8, 0]


@pytest.mark.further
def test_parents_have_at_least_the_priority_of_children():
    cache, opened = allocate(fresh(), 0)
    cache, step = append(cache, 0, 9, tokens=A)
    cache = write_tokens(cache, step, A)
    cache, child = jkv.fork(cache, opened.seq_ids, np.array([5], np.int32))
    # The second block is freed with priority 2 while the first is in use.
    cache, _ = free_by(cache, [0], [2])
    cache, _ = free_by(cache, child.seq_ids, [0])
    assert found(pressed(cache, 6), A) == [8]


def test_demote_keeps_recent_and_referenced_blocks():
    cache = played(played(fresh(), A, keep=1), B, keep=2)
    time = int(jkv.clock(cache))
    later = played(cache, A)
    lowered = jkv.demote(later, time)
    jkv.check(lowered)
    assert found(pressed(lowered, 6), A, B) == [8, 0]
    assert found(pressed(later, 6), A, B) == [0, 8]
    in_use, opened = allocate(cache, 0, tokens=[[*A]])
    in_use, _ = free_by(jkv.demote(in_use, time), opened.seq_ids, [0])
    assert found(pressed(in_use, 6), A, B) == [8, 0]


def test_demoted_blocks_keep_lru_order():
    """A is evicted before B, which was used later, although B always had priority 0."""
    cache = played(played(fresh(), A, keep=2), B)
    lowered = jkv.demote(cache, jkv.clock(cache))
    assert ring_order(lowered) == ring_order(played(played(fresh(), A), B))


def test_the_caller_may_set_the_deadline_and_the_latest_counts():
    cache = played(played(fresh(), A, keep=1, until=50), A, keep=1, until=70)
    cache = played(cache, B, keep=1, until=2**32 - 1)  # the maximum
    for time, num_kept in ((69, 4), (70, 2), (2**32 - 2, 2), (np.uint32(2**32 - 1), 0)):
        kept = jkv.demote(cache, time).metadata.groups[0].free_blocks.kept
        assert np.count_nonzero(kept.classes) == num_kept
    assert not kept.kept_until.any()


@pytest.mark.parametrize("keep", [-1, 3, 2**31 - 1])
def test_an_invalid_priority_is_refused_and_changes_nothing(keep):
    cache, opened = allocate(fresh(), [4, 4])
    after, status = free_by(cache, [0, 1], [keep, 2])
    assert status == [Status.INVALID_ARGUMENT, Status.OK]
    assert after.metadata.is_open.tolist() == [True, False, False, False]
    plain, status = jkv.free(allocate(small_cache(), 4)[0], [0, 3, -1], keep=[1, 1, 1])
    assert status.tolist() == [
        *(Status.INVALID_ARGUMENT, Status.INVALID_SEQUENCE, Status.OK)
    ]
    jkv.check(plain)


def test_invalid_keep_classes_are_refused():
    with pytest.raises(ValueError, match="prefix_caching=True"):
        jkv.CacheConfig(**sizes(), keep_classes=2)
    with pytest.raises(ValueError, match="1 to 8"):
        jkv.CacheConfig(**sizes(), prefix_caching=True, keep_classes=9)
    with pytest.raises(ValueError, match="keep_classes"):
        jkv.GroupedConfig(
            groups=(jkv.CacheConfig(**sizes()),), layer_groups=(0,), keep_classes=2
        )
    grouped = jkv.GroupedConfig.for_context_length(
        64,
        max_sequences=2,
        layer_windows=[20, None],
        num_kv_heads=1,
        head_dim=2,
        prefix_caching=True,
        keep_classes=2,
    )
    cache = jkv.init(grouped)
    assert [len(g.free_blocks.by_class) for g in cache.metadata.groups] == [2, 2]
    assert grouped.bytes == cache.nbytes


def sizes():
    return dict(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        num_blocks=8,
        max_sequences=2,
        max_context_length=64,
    )


def test_one_priority_compiles_the_same_program():
    """No array, no retrace, and `demote` does nothing."""
    cache = small_cache(prefix_caching=True)
    assert cache.metadata.groups[0].free_blocks.kept is None
    assert jkv.demote(cache, 7) is cache


@pytest.mark.parametrize("kind", ["wrong ring", "no class", "child above its parent"])
def test_check_names_the_broken_retention_invariant(kind):
    cache = played(fresh(), A, keep=1)
    ring = cache.metadata.groups[0].free_blocks
    child, parent = ring.kept.rings[0].ids[:2].tolist()
    if kind == "wrong ring":
        classes, text = ring.kept.classes.at[child].set(2), f"block {child} is in the"
    elif kind == "no class":
        classes, text = (
            ring.kept.classes.at[child].set(3),
            f"block {child} has class 3 of 3",
        )
    else:
        cache, _ = allocate(cache, 0, tokens=[[*A]])
        ring = cache.metadata.groups[0].free_blocks
        classes = ring.kept.classes.at[parent].set(0)
        text = f"block {child} is of a higher class than its parent {parent}"
    kept = dataclasses.replace(ring.kept, classes=classes)
    ring = dataclasses.replace(ring, kept=kept)
    with pytest.raises(jkv.InvariantError, match=text):
        jkv.check(with_metadata(cache, free_blocks=ring))


@pytest.mark.further
def test_priorities_are_saved_spilled_and_restored(tmp_path):
    """They pass a file, a value, and a store whose folder another process reads."""
    cache = played(played(fresh(), A, keep=2, until=9), B, keep=1)
    jkv.save(tmp_path / "whole", cache)
    loaded = jkv.load(tmp_path / "whole")
    assert ring_order(loaded) == ring_order(cache)
    bare, spilled = jkv.spill(cache, 4)
    assert found(bare, A, B) == [0, 0]
    store = jkv.BlockStore(0, folder=tmp_path / "store", max_folder_bytes=2**20)
    store.put(pickle.loads(pickle.dumps(spilled)))
    store.flush()
    store = jkv.BlockStore(2**20, folder=tmp_path / "store", max_folder_bytes=2**20)
    for sequence in (B, A):
        bare, num = jkv.restore(bare, store.find([*sequence]))
        assert num == 2
    jkv.check(bare)
    kept = bare.metadata.groups[0].free_blocks.kept
    assert sorted(kept.classes.tolist()) == [0, 0, 0, 0, 1, 1, 2, 2]
    assert found(pressed(bare, 6), A, B) == [8, 0]
    # A cache with fewer priorities clips them.
    other, _ = jkv.restore(small_cache(prefix_caching=True), store.find([*A]))
    assert found(other, A) == [8]


@pytest.mark.further
def test_restored_blocks_raise_the_priority_of_parents():
    """The parent was demoted while its child was spilled."""
    cache = played(fresh(), A, keep=2)
    cache, spilled = jkv.spill(cache, 1)
    cache = jkv.demote(cache, jkv.clock(cache))
    cache, num = jkv.restore(cache, spilled)
    jkv.check(cache)
    assert num == 1 and found(pressed(played(cache, B), 6), A, B) == [8, 0]


@pytest.mark.further
def test_a_parent_stored_with_a_lower_priority_gets_its_childs():
    store = jkv.BlockStore(2**20)
    cache, spilled = jkv.spill(played(fresh(), A), 4)
    store.put(spilled)
    cache, _ = jkv.restore(cache, store.find([*A]))
    _, spilled = jkv.spill(played(cache, A, keep=2), 1)  # only the child
    store.put(spilled)
    stored = store.find([*A])
    assert [held.keep[0] for held in stored.held.values()] == [0, 2]
    cache, num = jkv.restore(fresh(), stored)
    jkv.check(cache)
    assert num == 2 and found(pressed(played(cache, B), 6), A, B) == [8, 0]


@pytest.mark.further
def test_a_donated_free_does_not_copy_the_pool():
    cache = jkv.init(
        jkv.CacheConfig(
            **sizes() | dict(num_blocks=4096), prefix_caching=True, keep_classes=3
        )
    )
    one = jnp.zeros(2, jnp.int32)
    for verb in (lambda cache, ids: jkv.free(cache, ids, keep=ids), jkv.allocate):
        compiled = jax.jit(verb, donate_argnums=0).lower(cache, one).compile()
        copies = [
            line.strip()
            for line in compiled.as_text().splitlines()
            if " copy(" in line and ("[4096]" in line or "[8192]" in line)
        ]
        assert copies == []


class KeepingResizingGame(KeepingGame, ResizingGame):
    """Random operations with priorities and resizes."""


CASES = further(
    [
        ("roomy", "donated", KeepingSpillGame),
        ("full and window", "jitted", KeepingSpillGame),
        ("three", "donated", KeepingGame),
        ("blocks of one", "jitted", KeepingGame),
    ]
)


@pytest.mark.parametrize("name, mode, kind", CASES)
def test_random_operations_with_priorities(name, mode, kind, tmp_path):
    verbs, num_kept = make_keeping_verbs(mode), 0
    groups, shape = GROUPED.get(name, (None, SHAPES.get(name)))
    for seed in range(EFFORT):
        game = kind(
            shape, verbs, seed, donate=mode == "donated", folder=tmp_path, groups=groups
        )
        game.play(num_operations=80)
        num_kept += game.num_kept
    assert num_kept > 0


@pytest.mark.further
def test_random_operations_with_priorities_between_resizes():
    verbs = make_keeping_verbs("eager")
    # One trace per size.
    verbs["read_all"] = jax.jit(random_operations.read_all)
    game = KeepingResizingGame((15, 2, 5, 9), verbs, 43)
    game.play(num_operations=40)
    assert game.num_resizes > 1 and game.num_kept > 0

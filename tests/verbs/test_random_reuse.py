"""Random operations with prompts, late commits, aborted steps and weak hashes.

`JKV_RANDOM_OPERATIONS=20` runs all shapes in all modes, twenty times each.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from support.caches.random_operations import DTYPES, GROUPED, SHAPES
from support.caches.random_reuse import ReuseGame, make_reuse_verbs
from support.jax_versions import dealt, further
from support.small_caches import (
    allocate,
    append,
    free,
    match,
    small_cache,
    stored_tokens,
    write_tokens,
)
from test_random_operations import EFFORT

import jkv
from jkv.prefixes import hashing

pytestmark = pytest.mark.filterwarnings("ignore:keys in int4")
MODES = ["donated", "jitted", "eager"]
# Shapes with prefix cache hits; in others blocks are rarely filled.
# `test_compaction.py` runs eagerly.
OTHERS = {"many sequences": "eager", "blocks of one": "jitted", "few blocks": "eager"}
CASES = [("roomy", "donated"), *further(OTHERS.items())]
ALL_CASES = [(name, mode) for name in SHAPES for mode in MODES]


@pytest.mark.parametrize("name, mode", CASES if EFFORT == 1 else ALL_CASES)
@pytest.mark.one_end
def test_random_reuse(name, mode, tmp_path):
    verbs = make_reuse_verbs(mode)
    for seed in range(EFFORT):
        game = ReuseGame(
            SHAPES[name],
            verbs,
            seed=777 * len(name) + seed,
            donate=mode == "donated",
            folder=tmp_path,
            dtype=DTYPES.get(name, "float32"),
        )
        game.play(num_operations=100)
        # With a single block, or long blocks, few are ever filled.
        assert game.num_hits > 0 or name.startswith(("one", "blocks of 16"))


# Shapes, windows above the block size (required by the index), sinks; and seeds.
CUT_SHORT = {
    "window": ((16, 2, 4, 17), (4, 0), 5),
    "window and sinks": ((18, 2, 5, 23), (5, 3), 338),
}


# The groups below have windows and sinks, too.
@pytest.mark.parametrize(
    "name, mode",
    dealt(further([("window", "donated"), ("window and sinks", "jitted")])),
)
def test_random_reuse_with_a_window(name, mode, tmp_path):
    """A prompt is found if the tokens its next row needs are cached.

    The oracle identifies prefixes by all of their tokens.
    """
    verbs = make_reuse_verbs(mode)
    shape, window, first_seed = CUT_SHORT[name]
    num_hits = num_beyond = 0
    for seed in range(EFFORT):
        game = ReuseGame(
            shape,
            verbs,
            seed=first_seed + seed,
            donate=mode == "donated",
            folder=tmp_path,
            window=window,
        )
        game.play(num_operations=200)
        num_hits, num_beyond = num_hits + game.num_hits, num_beyond + game.num_beyond
    assert num_hits > num_beyond > 0


# "three" includes all features of the others.
GROUP_MODES = {"three": "jitted", "full and window": "jitted"}
GROUP_MODES |= {"two full": "donated", "two windows": "eager"}
PLAYED_GROUPS = further(GROUP_MODES.items())
ALL_GROUPS = [(name, mode) for name in GROUPED for mode in MODES]


@pytest.mark.parametrize("name, mode", PLAYED_GROUPS if EFFORT == 1 else ALL_GROUPS)
@pytest.mark.one_end
def test_random_reuse_in_groups(name, mode, tmp_path):
    """A prompt is found if each group has the tokens its next row needs."""
    verbs = make_reuse_verbs(mode)
    groups, shape = GROUPED[name]
    num_hits = num_beyond = 0
    for seed in range(EFFORT):
        game = ReuseGame(
            shape,
            verbs,
            seed=99 * len(name) + seed,
            donate=mode == "donated",
            folder=tmp_path,
            dtype=DTYPES.get(name, "float32"),
            groups=groups,
        )
        game.play(num_operations=150)
        num_hits, num_beyond = num_hits + game.num_hits, num_beyond + game.num_beyond
    assert num_hits > num_beyond
    assert (num_beyond > 0) == any(pool.window for pool in groups)


@pytest.mark.further  # test_prefixes.py covers each comparison behind such a hash
@pytest.mark.parametrize("mask", [0, 1], ids=["constant", "one bit"].__getitem__)
@pytest.mark.one_end
def test_a_hash_that_collides_never_gives_a_wrong_hit(mask, monkeypatch):
    """A hit has the prompt's tokens, and its blocks satisfy the invariants."""
    good, traced = hashing.column_hash, []

    def poor(tokens, column):
        traced.append(column)
        return good(tokens, column) & np.uint32(mask)

    monkeypatch.setattr(hashing, "column_hash", poor)
    monkeypatch.setattr(
        hashing, "salt_hash", lambda salts: jnp.full(salts.shape, 7, jnp.uint32)
    )
    # A pool size of its own, so that no compiled program is shared with other tests.
    cache = small_cache(num_blocks=37 + mask, prefix_caching=True)
    rng = np.random.default_rng(mask)
    length, num_hits = 13, 0
    for _ in range(25):
        prompts = rng.integers(1, 3, size=(2, length)).tolist()
        salts = rng.integers(2, size=2)
        found = match(cache, prompts, salts)
        cache, opened = allocate(cache, 0, tokens=prompts, salts=salts)
        assert opened.num_cached.tolist() == found
        num_hits += sum(found)
        jkv.check(cache)
        for seq_id, prompt, start in zip(
            opened.seq_ids.tolist(), prompts, found, strict=True
        ):
            assert stored_tokens(cache, seq_id) == prompt[:start]
            rest = prompt[start:]
            cache, step = append(cache, seq_id, len(rest), tokens=rest)
            cache = write_tokens(cache, step, rest)
            jkv.check(cache)
            assert stored_tokens(cache, seq_id) == prompt
            assert jkv.tokens(cache, seq_id).tolist()[:length] == prompt
        cache, _ = free(cache, opened.seq_ids)
        jkv.check(cache)
    assert num_hits > 0 and traced

"""Random operations with cached blocks that spill to the host and are restored."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.caches.random_operations import DTYPES, GROUPED, SHAPES
from support.caches.random_reuse import make_reuse_verbs
from support.caches.spilling import SpillGame, StateSpillGame
from support.jax_versions import further
from support.small_caches import (
    allocate,
    append,
    free,
    match,
    small_cache,
    stored_tokens,
    write_tokens,
)
from support.states.random_states import make_state_verbs
from test_random_operations import EFFORT
from test_random_states import GAMES

import jkv
from jkv.prefixes import hashing

# One group; `test_keeping.py` covers the same with priorities.
CASES = further([("roomy", "donated"), ("few blocks", "jitted")])
# Groups with states are tested below.
GROUPS = further([("full and window", "jitted"), ("three", "donated")])
GROUPS += further([("two full", "jitted")])


@pytest.mark.parametrize("name, mode", CASES)
@pytest.mark.one_end
def test_random_spilling(name, mode, tmp_path):
    verbs = make_reuse_verbs(mode)
    num_restored = 0
    for seed in range(EFFORT):
        game = SpillGame(
            SHAPES[name],
            verbs,
            seed=99 + seed,
            donate=mode == "donated",
            folder=tmp_path,
            dtype=DTYPES.get(name, "float32"),
        )
        game.play(num_operations=150)
        num_restored += game.num_restored
    assert num_restored > 0


@pytest.mark.parametrize("name, mode", GROUPS)
@pytest.mark.one_end
def test_random_spilling_in_groups(name, mode, tmp_path):
    verbs = make_reuse_verbs(mode)
    groups, shape = GROUPED[name]
    num_restored = 0
    for seed in range(EFFORT):
        game = SpillGame(
            shape,
            verbs,
            seed=17 * len(name) + seed,
            donate=mode == "donated",
            folder=tmp_path,
            groups=groups,
        )
        game.play(num_operations=150)
        num_restored += game.num_restored
    assert num_restored > 0


STATES = further(
    [("full and window", "jitted"), ("full", "donated"), ("states alone", "donated")]
)


@pytest.mark.parametrize("name, mode", STATES)
@pytest.mark.one_end
def test_random_spilling_of_states(name, mode, tmp_path):
    groups, place, shape, rules = GAMES[name]
    verbs, num_restored = make_state_verbs(mode), 0
    for seed in range(EFFORT):
        game = StateSpillGame(
            groups,
            shape,
            rules,
            verbs,
            seed=31 * len(name) + seed,
            place=place,
            donate=mode == "donated",
            folder=tmp_path,
        )
        game.play(num_operations=150)
        num_restored += game.num_restored
    assert num_restored > 0


@pytest.mark.parametrize("mask", [0, *further([3])], ids=["constant", "two bits"])
@pytest.mark.one_end
def test_restored_blocks_match_tokens_under_hash_collisions(mask, monkeypatch):
    """Collisions reduce hits, and never return another sequence's blocks."""
    good = hashing.column_hash
    monkeypatch.setattr(
        hashing,
        "column_hash",
        lambda tokens, column: good(tokens, column) & np.uint32(mask),
    )
    monkeypatch.setattr(
        hashing, "salt_hash", lambda salts: jnp.full(salts.shape, 7, jnp.uint32)
    )
    # A pool size of its own, so that no compiled program is shared with other tests.
    cache = small_cache(num_blocks=41 + mask, prefix_caching=True)
    rng, num_found, spilled = np.random.default_rng(mask), 0, []
    for _ in range(12):
        prompt, salt = rng.integers(1, 3, 13).tolist(), int(rng.integers(2))
        found = match(cache, [prompt], [salt])[0]
        cache, opened = allocate(cache, 0, tokens=[prompt], salts=[salt])
        seq_id, rest = int(opened.seq_ids[0]), prompt[found:]
        assert stored_tokens(cache, seq_id) == prompt[:found]
        num_found += found
        cache, batch = append(cache, seq_id, len(rest), tokens=rest)
        cache = write_tokens(cache, batch, rest)
        cache, _ = free(cache, seq_id)
        cache, some = jkv.spill(cache, int(rng.integers(1, 9)))
        spilled.append(some)
        for each in rng.permutation(len(spilled))[:3]:
            cache, _ = jkv.restore(cache, spilled[each])
            jkv.check(cache)
    assert num_found > 0

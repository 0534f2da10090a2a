"""Random operations with cached blocks that leave for the host and come back."""

import pytest
from support.jax_versions import further
from support.random_operations import DTYPES, GROUPED, SHAPES
from support.random_reuse import make_reuse_verbs
from support.random_states import make_state_verbs
from support.spilling import SpillGame, StateSpillGame
from test_random_operations import EFFORT
from test_random_states import GAMES

CASES = [("roomy", "donated"), *further([("few blocks", "jitted")])]
GROUPS = [("full and window", "jitted"), *further([("three", "donated")])]
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


STATES = [("full and window", "jitted"), *further([("full", "donated")])]
STATES += further([("states alone", "donated")])


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

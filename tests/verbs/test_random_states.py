"""Random operations on caches with recurrent states in some layers.

`JKV_RANDOM_OPERATIONS=20` runs all games in all modes, twenty times each.
"""

import pytest
from support.caches.random_operations import Pool
from support.jax_versions import further
from support.oracle.cache import StateRules
from support.states.random_states import StateGame, make_state_verbs
from test_random_operations import EFFORT

MODES = ["donated", "jitted", "eager"]
# Groups with blocks, the index of the group with states, the shape, and the limits.
GAMES = {
    "full": ((Pool(16),), 0, (2, 4, 17), StateRules(3, 3, 4)),
    "full and window": ((Pool(24), Pool(12, 4)), 1, (2, 5, 23), StateRules(2, 4, 2)),
    "window": ((Pool(14, 5, 3),), 1, (2, 4, 19), StateRules(0, 5, 4)),
    "states alone": ((), 0, (2, 4, 19), StateRules(2, 3, 4)),
}
CASES = [("states alone", "donated"), *further([("full and window", "jitted")])]
CASES += further([("full", "donated"), ("window", "eager")])
ALL_CASES = [(name, mode) for name in GAMES for mode in MODES]


@pytest.mark.parametrize("name, mode", CASES if EFFORT == 1 else ALL_CASES)
@pytest.mark.one_end
def test_random_states(name, mode, tmp_path):
    """The state of a sequence is the fold of its tokens after any operations."""
    groups, place, shape, rules = GAMES[name]
    verbs, num_hits, num_cuts = make_state_verbs(mode), 0, 0
    for seed in range(EFFORT):
        game = StateGame(
            groups,
            shape,
            rules,
            verbs,
            seed=99 * len(name) + seed,
            place=place,
            donate=mode == "donated",
            folder=tmp_path,
        )
        game.play(num_operations=150)
        num_hits += game.num_hits
        num_cuts += game.num_cuts_to_snapshots
    assert num_hits > 0 or name == "window"
    # A window has usually released the tokens that the row after a snapshot needs.
    assert num_cuts > 0 or "window" in name

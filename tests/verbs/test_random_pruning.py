"""Random operations with prune among them, compared with the plain-Python cache."""

import os

import pytest
from support.jax_versions import further
from support.oracle.cache import INVALID_ARGUMENT, OK, StateRules
from support.random_operations import GROUPED, SHAPES, WINDOWED, Pool
from support.random_pruning import (
    PruneGame,
    PruneReuseGame,
    PruneStateGame,
    make_pruned_state_verbs,
    make_pruning_verbs,
)

from jkv.blocks import row_copies

pytestmark = [
    pytest.mark.filterwarnings("ignore:keys in int4"),
    pytest.mark.one_end,
]
EFFORT = int(os.environ.get("JKV_RANDOM_OPERATIONS", "1"))
DTYPES = {"few blocks": ("int8", "int4"), "three": ("int8", "int4")}

PLAIN = [("roomy", "donated"), *further([("few blocks", "jitted")])]
WINDOWS = further([("window", "jitted"), ("window and sinks", "donated")])
GROUPS = [
    ("full and window", "donated"),
    *further([("two full", "jitted"), ("three", "eager")]),
]


@pytest.fixture(autouse=True)
def _few_columns_per_trip(monkeypatch):
    """Copy in several trips, whose order then matters."""
    monkeypatch.setattr(row_copies, "COLUMNS_PER_TRIP", 1)


def play(game, num_operations):
    for _ in range(num_operations):
        game.play(num_operations=1)
    assert {OK, INVALID_ARGUMENT} <= set(game.num_requests)
    return game


@pytest.mark.parametrize("name, mode", PLAIN)
def test_pruned_sequences_keep_the_selected_tokens(name, mode, tmp_path):
    verbs = make_pruning_verbs(mode)
    for seed in range(EFFORT):
        game = PruneGame(
            SHAPES[name],
            verbs,
            seed=70 * len(name) + seed,
            record_tokens=True,
            donate=mode == "donated",
            folder=tmp_path,
            dtype=DTYPES.get(name, "float32"),
        )
        play(game, 150)
        assert sum(game.num_pruned.values()) > 30


@pytest.mark.parametrize("name, mode", WINDOWS)
def test_windows_move_behind_the_kept_tokens(name, mode, tmp_path):
    verbs = make_pruning_verbs(mode)
    shape, window = WINDOWED[name]
    for seed in range(EFFORT):
        game = PruneGame(
            shape,
            verbs,
            seed=30 * len(name) + seed,
            record_tokens=True,
            donate=mode == "donated",
            folder=tmp_path,
            window=window,
        )
        play(game, 150)


@pytest.mark.parametrize("name, mode", GROUPS)
def test_groups_are_pruned_together(name, mode, tmp_path):
    verbs = make_pruning_verbs(mode)
    groups, shape = GROUPED[name]
    for seed in range(EFFORT):
        game = PruneGame(
            shape,
            verbs,
            seed=40 * len(name) + seed,
            record_tokens=True,
            donate=mode == "donated",
            folder=tmp_path,
            dtype=DTYPES.get(name, "float32"),
            groups=groups,
        )
        play(game, 150)


REUSED = [("roomy", "donated"), *further([("few blocks", "jitted")])]
REUSED_GROUPS = further([("full and window", "jitted"), ("two windows", "donated")])


def play_reuse(game, num_operations):
    play(game, num_operations)
    assert game.num_hits > 3
    return game


@pytest.mark.parametrize("name, mode", REUSED)
def test_pruned_sequences_are_never_found_as_prefixes(name, mode, tmp_path):
    verbs = make_pruning_verbs(mode)
    for seed in range(EFFORT):
        game = PruneReuseGame(
            SHAPES[name],
            verbs,
            seed=90 * len(name) + seed,
            donate=mode == "donated",
            folder=tmp_path,
        )
        play_reuse(game, 220)


@pytest.mark.parametrize("name, mode", REUSED_GROUPS)
def test_pruned_groups_are_never_found_as_prefixes(name, mode, tmp_path):
    verbs = make_pruning_verbs(mode)
    groups, shape = GROUPED[name]
    for seed in range(EFFORT):
        game = PruneReuseGame(
            shape,
            verbs,
            seed=80 * len(name) + seed,
            donate=mode == "donated",
            folder=tmp_path,
            groups=groups,
        )
        play_reuse(game, 220)


STATES = {
    "full": ((Pool(16),), 0, (2, 4, 17), StateRules(3, 3, 4)),
    "full and window": ((Pool(24), Pool(12, 4)), 1, (2, 5, 23), StateRules(2, 4, 2)),
}
STATE_CASES = [("full", "donated"), *further([("full and window", "jitted")])]


@pytest.mark.parametrize("name, mode", STATE_CASES)
def test_states_stay_when_their_tokens_are_dropped(name, mode, tmp_path):
    verbs = make_pruned_state_verbs(mode)
    groups, place, shape, rules = STATES[name]
    for seed in range(EFFORT):
        game = PruneStateGame(
            groups,
            shape,
            rules,
            verbs,
            seed=60 * len(name) + seed,
            place=place,
            donate=mode == "donated",
            folder=tmp_path,
        )
        play(game, 180)
        assert sum(game.num_pruned.values()) > 20

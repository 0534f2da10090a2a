"""Random operations with prune, compared with the plain-Python cache."""

import os

import pytest
from support.caches.random_operations import GROUPED, SHAPES, WINDOWED, Pool
from support.caches.random_pruning import (
    PruneGame,
    PruneReuseGame,
    PruneStateGame,
    make_pruned_state_verbs,
    make_pruning_verbs,
)
from support.jax_versions import further
from support.oracle.cache import INVALID_ARGUMENT, OK, StateRules

from jkv.blocks import row_copies

pytestmark = [
    pytest.mark.filterwarnings("ignore:keys in int4"),
    pytest.mark.one_end,
]
EFFORT = int(os.environ.get("JKV_RANDOM_OPERATIONS", "1"))
DTYPES = {"few blocks": ("int8", "int4"), "three": ("int8", "int4")}

PLAIN = further([("roomy", "donated"), ("few blocks", "jitted")])
WINDOWS = further([("window", "jitted"), ("window and sinks", "donated")])
GROUPS = further(
    [("full and window", "donated"), ("two full", "jitted"), ("three", "eager")]
)


@pytest.fixture(autouse=True)
def _few_columns_per_trip(monkeypatch):
    """Several trips per copy, so that their order matters."""
    monkeypatch.setattr(row_copies, "COLUMNS_PER_TRIP", 1)


def play_games(kind, *args, seed, mode, folder, num_operations=100, **options):
    """Play and return games of one kind."""
    games = []
    for number in range(EFFORT):
        donate = mode == "donated"
        game = kind(*args, seed=seed + number, donate=donate, folder=folder, **options)
        for _ in range(num_operations):
            game.play(num_operations=1)
        assert {OK, INVALID_ARGUMENT} <= set(game.num_requests)
        games.append(game)
    return games


@pytest.mark.parametrize("name, mode", PLAIN)
def test_pruned_sequences_keep_the_selected_tokens(name, mode, tmp_path):
    games = play_games(
        PruneGame,
        SHAPES[name],
        make_pruning_verbs(mode),
        seed=70 * len(name),
        mode=mode,
        folder=tmp_path,
        record_tokens=True,
        dtype=DTYPES.get(name, "float32"),
    )
    assert all(sum(game.num_pruned.values()) > 30 for game in games)


@pytest.mark.parametrize("name, mode", WINDOWS)
def test_windows_move_after_the_kept_tokens(name, mode, tmp_path):
    shape, window = WINDOWED[name]
    play_games(
        PruneGame,
        shape,
        make_pruning_verbs(mode),
        seed=30 * len(name),
        mode=mode,
        folder=tmp_path,
        record_tokens=True,
        window=window,
    )


@pytest.mark.parametrize("name, mode", GROUPS)
def test_groups_are_pruned_together(name, mode, tmp_path):
    groups, shape = GROUPED[name]
    play_games(
        PruneGame,
        shape,
        make_pruning_verbs(mode),
        seed=40 * len(name),
        mode=mode,
        folder=tmp_path,
        record_tokens=True,
        dtype=DTYPES.get(name, "float32"),
        groups=groups,
    )


REUSED = further([("roomy", "donated"), ("few blocks", "jitted")])
REUSED_GROUPS = further([("full and window", "jitted"), ("two windows", "donated")])


@pytest.mark.parametrize("name, mode", REUSED)
def test_pruned_sequences_are_never_found_as_prefixes(name, mode, tmp_path):
    games = play_games(
        PruneReuseGame,
        SHAPES[name],
        make_pruning_verbs(mode),
        seed=90 * len(name),
        mode=mode,
        folder=tmp_path,
        num_operations=220,
    )
    assert all(game.num_hits > 3 for game in games)


@pytest.mark.parametrize("name, mode", REUSED_GROUPS)
def test_pruned_groups_are_never_found_as_prefixes(name, mode, tmp_path):
    groups, shape = GROUPED[name]
    games = play_games(
        PruneReuseGame,
        shape,
        make_pruning_verbs(mode),
        seed=80 * len(name),
        mode=mode,
        folder=tmp_path,
        num_operations=220,
        groups=groups,
    )
    assert all(game.num_hits > 3 for game in games)


STATES = {
    "full": ((Pool(16),), 0, (2, 4, 17), StateRules(3, 3, 4)),
    "full and window": ((Pool(24), Pool(12, 4)), 1, (2, 5, 23), StateRules(2, 4, 2)),
}
STATE_CASES = further([("full", "donated"), ("full and window", "jitted")])


@pytest.mark.parametrize("name, mode", STATE_CASES)
def test_states_are_kept_if_their_tokens_are_dropped(name, mode, tmp_path):
    groups, place, shape, rules = STATES[name]
    games = play_games(
        PruneStateGame,
        groups,
        shape,
        rules,
        make_pruned_state_verbs(mode),
        seed=60 * len(name),
        mode=mode,
        folder=tmp_path,
        num_operations=180,
        place=place,
    )
    assert all(sum(game.num_pruned.values()) > 20 for game in games)

"""Random operations, each compared with the plain-Python cache.

`JKV_RANDOM_OPERATIONS=20` runs all shapes in all modes, twenty times each.
"""

import copy
import functools
import os
from collections import Counter

import numpy as np
import pytest
from support.caches.random_operations import (
    DTYPES,
    GROUPED,
    SHAPES,
    WINDOWED,
    Game,
    make_verbs,
)
from support.jax_versions import further
from support.oracle.cache import INVALID_ARGUMENT, OK
from support.small_caches import with_metadata, with_storage_filled

import jkv

# int4 keys warn.
pytestmark = pytest.mark.filterwarnings("ignore:keys in int4")
EFFORT = int(os.environ.get("JKV_RANDOM_OPERATIONS", "1"))
MODES = ["eager", "jitted", "donated"]
# The newest JAX runs `test_random_reuse.py`, which has all of these operations. Each
# shape runs in one mode; with more effort all shapes run in all modes.
PLAYED = {"roomy": "eager", "few blocks": "donated"}
FURTHER = {
    "one cell": "eager",
    "one block": "jitted",
    "blocks of one": "jitted",
    "many sequences": "donated",
    "blocks of 16": "eager",
}
CASES = [*PLAYED.items(), *further(FURTHER.items())]
ALL_CASES = [(name, mode) for name in SHAPES for mode in MODES]
# Two of the shapes that run eagerly: their programs are already compiled.
EAGER = ["roomy", *further(["blocks of 16"])]


@pytest.mark.parametrize("name, mode", CASES if EFFORT == 1 else ALL_CASES)
@pytest.mark.one_end
def test_random_operations(name, mode, tmp_path):
    verbs, num_shared = make_verbs(mode), 0
    for seed in range(EFFORT):
        game = Game(
            SHAPES[name],
            verbs,
            seed=1000 * len(name) + 1 + seed,
            record_tokens=mode != "eager",
            donate=mode == "donated",
            folder=tmp_path,
            dtype=DTYPES.get(name, "float32"),
        )
        game.play(num_operations=150)
        # Every status occurs if the shape allows it; with a single sequence or block
        # some occur only by luck.
        if not name.startswith("one"):
            assert set(game.num_requests) == set(range(7)), game.num_requests
            num_shared += game.num_shared
    if name in PLAYED:
        assert num_shared > 10


# Groups of layers have windows, too.
PLAYED_WINDOWED = further([("window and sinks", "jitted"), ("window", "donated")])
ALL_WINDOWED = [(name, mode) for name in WINDOWED for mode in MODES]


@pytest.mark.parametrize("name, mode", PLAYED_WINDOWED if EFFORT == 1 else ALL_WINDOWED)
@pytest.mark.one_end
def test_random_operations_with_a_window(name, mode, tmp_path):
    """Blocks that no later row needs are released."""
    verbs, num_gone = make_verbs(mode), 0
    shape, window = WINDOWED[name]
    for seed in range(EFFORT):
        game = Game(
            shape,
            verbs,
            seed=555 * len(name) + seed,
            record_tokens=mode != "eager",
            donate=mode == "donated",
            folder=tmp_path,
            window=window,
        )
        for _ in range(120):
            game.play(num_operations=1)
            num_gone += sum(t.count(None) for t in game.tables(0))
        assert {OK, INVALID_ARGUMENT} <= set(game.num_requests)
    assert num_gone > 50


OTHER_GROUPS = {"two full": "jitted", "two windows": "donated", "three": "eager"}
PLAYED_GROUPS = [("full and window", "donated"), *further(OTHER_GROUPS.items())]
ALL_GROUPS = [(name, mode) for name in GROUPED for mode in MODES]


@pytest.mark.parametrize("name, mode", PLAYED_GROUPS if EFFORT == 1 else ALL_GROUPS)
@pytest.mark.one_end
def test_random_operations_in_groups(name, mode, tmp_path):
    """Each group of layers has its own pool; a request is served in all or none."""
    verbs, requests = make_verbs(mode), Counter()
    groups, shape = GROUPED[name]
    num_gone = [0] * len(groups)
    for seed in range(EFFORT):
        game = Game(
            shape,
            verbs,
            seed=321 * len(name) + seed,
            record_tokens=mode != "eager",
            donate=mode == "donated",
            folder=tmp_path,
            dtype=DTYPES.get(name, "float32"),
            groups=groups,
        )
        for _ in range(120):
            game.play(num_operations=1)
            for g in range(len(groups)):
                num_gone[g] += sum(table.count(None) for table in game.tables(g))
        requests += game.num_requests
    assert set(requests) == set(range(7)), requests
    assert all(
        (num > 30) == bool(p.window) for num, p in zip(num_gone, groups, strict=True)
    )


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.one_end
def test_random_operations_without_storage(name, tmp_path):
    """A cache without storage agrees with the oracle, too."""
    game = Game(SHAPES[name], make_verbs("eager"), 7, storage=False, folder=tmp_path)
    game.play(num_operations=120)


@functools.cache
def played_game(name):
    """Return a game whose longest sequence has more than one block."""
    game = Game(SHAPES[name], make_verbs("eager"), seed=11)
    game.play(num_operations=40)
    while not game.oracle.open or game.oracle.block_size >= max(
        len(each.tokens) for each in game.oracle.open.values()
    ):
        game.play(num_operations=1)
    game.compare_state()
    return game


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.one_end
class TestTheComparisonCanFail:
    """A cache with a single error is detected."""

    @pytest.fixture
    def game(self, name):
        return copy.copy(played_game(name))

    @pytest.fixture
    def longest(self, game):
        return max(game.oracle.open, key=lambda i: len(game.oracle.tokens(i)))

    def assert_found_out(self, compare):
        with pytest.raises((AssertionError, jkv.InvariantError)):
            compare()

    def with_changed(self, game, name, index, value):
        metadata = game.cache.metadata
        of = metadata if hasattr(metadata, name) else metadata.groups[0]
        array = np.array(getattr(of, name))
        array[index] += value
        return with_metadata(game.cache, **{name: array})

    def test_permuted_block_table(self, game, longest):
        tables = np.array(game.cache.metadata.groups[0].block_tables)
        tables[longest, :2] = tables[longest, 1::-1]
        game.cache = with_metadata(game.cache, block_tables=tables)
        self.assert_found_out(game.compare_all_contents)

    @pytest.mark.parametrize("shift", [-1, 1])
    def test_shifted_length(self, game, longest, shift):
        game.cache = self.with_changed(game, "context_lengths", longest, shift)
        self.assert_found_out(game.compare_state)

    def test_zeroed_storage(self, game):
        game.cache = with_storage_filled(game.cache, 0.0)
        self.assert_found_out(game.compare_all_contents)

    def test_leaked_reference(self, game, longest):
        block = game.oracle.table(longest)[0]
        game.cache = self.with_changed(game, "reference_counts", block, 1)
        self.assert_found_out(lambda: jkv.check(game.cache))

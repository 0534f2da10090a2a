"""What version 0.2 wrote is still read: its arrays have other names today.

The fixtures hold a cache of a layer with keys and one with a state, each the sum of
what its tokens bring, and a prefix index. Token t has the numbers t and -t: as its key,
with the signs changed as its value, and as what it brings. Sequence 0 has tokens 100 to
110, the last two of them pending; sequence 1 is a fork of it that was cut back to 9;
sequence 2 has tokens 200 to 203. Snapshots are at the ends of steps: 8 and 4.
"""

import numpy as np
import pytest
from support.paths import FIXTURES

import jkv

pytestmark = pytest.mark.one_end
WRITTEN = FIXTURES / "version_0_2"
TEXTS = {0: range(100, 111), 1: range(100, 109), 2: range(200, 204)}


def assert_holds(cache: jkv.Cache, seq_id: int, text: range) -> None:
    """Check the tokens, the keys and the state of one sequence."""
    numbers = np.array(text, np.float32)
    assert jkv.tokens(cache, seq_id)[: len(text)].tolist() == list(text)
    keys, _, length = jkv.read(cache, 1, seq_id)
    assert int(length) == len(text)
    np.testing.assert_array_equal(keys[: len(text), 0, 0], numbers)
    (states,) = cache.states
    base = int(states.bases[0, seq_id])
    assert base == min(len(text), 9 if text[0] == 100 else 4)
    total = numbers[:base].sum()
    np.testing.assert_array_equal(states.rows["sum"][0, seq_id], [total, -total])


def test_a_cache_with_snapshots_is_read() -> None:
    cache = jkv.load(WRITTEN / "cache.safetensors")
    jkv.check(cache)
    for seq_id, text in TEXTS.items():
        assert_holds(cache, seq_id, text)
    assert np.flatnonzero(jkv.snapshots(cache, 0)).tolist() == [8]
    prompts = [list(range(100, 112)), list(range(200, 212))]
    assert jkv.match(cache, prompts, 5).tolist() == [8, 4]


def test_its_sequences_are_read_into_a_cache() -> None:
    whole = jkv.load(WRITTEN / "cache.safetensors")
    cache, _ = jkv.free(whole, list(TEXTS))
    cache, back = jkv.load(WRITTEN / "sequences.safetensors", cache)
    jkv.raise_for_status(back)
    jkv.check(cache)
    for old, new in zip((0, 1), back.seq_ids.tolist(), strict=True):
        assert_holds(cache, new, TEXTS[old])

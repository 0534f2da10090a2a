"""What version 0.2.0 wrote is still read.

Its files hold two sequences each, 1 of five tokens, 8 to 12, and 3 of eight, 0 to 7: a
cache of layers with a state, of which one has a window of five tokens, too, and
sequences from a cache of two groups of layers, the first of which has that window.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.folding_model import make_config
from support.paths import FIXTURES
from support.small_caches import small_config

import jkv
from jkv.storage import files

pytestmark = pytest.mark.one_end
WRITTEN = FIXTURES / "version_0_2"
TOKENS = {1: np.arange(8, 13), 3: np.arange(8)}


def numbers_of(seq_id: int) -> np.ndarray:
    """What was stored of each token: itself and its position, and one for a key."""
    tokens = TOKENS[seq_id]
    return tokens + np.arange(len(tokens))


def test_a_cache_is_read() -> None:
    cache = jkv.load(WRITTEN / "cache.safetensors")
    jkv.check(cache)
    assert cache.metadata.context_lengths.tolist() == [0, 5, 0, 8]
    for seq_id, tokens in TOKENS.items():
        kept, count = jkv.tokens(cache, seq_id), len(tokens)
        assert kept[:count].tolist() == tokens.tolist()
        keys, values, length = jkv.read(cache, 0, seq_id)
        assert int(length) == count
        for rows in keys, values:
            expected = numbers_of(seq_id)[4:] + 1.0
            np.testing.assert_array_equal(rows[4:count, 0, 0], expected)
    assert jkv.match(cache, np.arange(12)[None]).tolist() == [8]
    assert np.flatnonzero(jkv.snapshots(cache, 3)).tolist() == [8]


def test_states_and_what_is_pending_are_read() -> None:
    cache = jkv.load(WRITTEN / "cache.safetensors")
    cache, batch = jkv.append(cache, [1, 3], tokens=[5, 5], num_pending=2)
    assert batch.pending_before.tolist() == [1, 2]
    state, pending = (
        read(cache, 2, batch) for read in (jkv.read_state, jkv.read_pending)
    )
    # A step adds the length of the text; six tokens were there before the cut.
    for array in state.values():
        np.testing.assert_array_equal(array, jnp.full_like(array, 8).at[0].set(6))
    expected = [[numbers_of(1)[-1], 0], numbers_of(3)[-2:]]
    np.testing.assert_array_equal(pending["at"], expected)
    np.testing.assert_array_equal(pending["token"][..., 1], expected)


def test_sequences_are_read_into_a_cache() -> None:
    windowed = small_config(sliding_window=5, num_layers=2, dtype="fp8")
    config = jkv.GroupedConfig(
        groups=(windowed, small_config(num_kv_heads=2, record_tokens=True)),
        layer_groups=(0, (), 1, 0),
    )
    cache, back = jkv.load(WRITTEN / "sequences.safetensors", jkv.init(config))
    jkv.raise_for_status(back)
    jkv.check(cache)
    for seq_id, was in zip(back.seq_ids.tolist(), (3, 1), strict=True):
        count = len(TOKENS[was])
        for layer, first in ((0, 4), (2, 0)):
            keys, values, length = jkv.read(cache, layer, seq_id)
            assert int(length) == count
            for rows in keys, values:
                expected = numbers_of(was)[first:] + 1.0
                # fp8 has four digits: numbers above 16 are the nearest even one.
                found = rows[first:count, -1, 0]
                np.testing.assert_allclose(found, expected, rtol=2.0**-4)


def test_sequences_with_states_find_their_groups(tmp_path) -> None:
    """0.2 numbered groups by their kind, and did not say how the kinds were mixed."""
    cache = jkv.load(WRITTEN / "cache.safetensors")
    assert [each.kind for each in cache.storage] == ["states", "blocks"]
    config = make_config("keys+state")  # the state comes first
    cache, opened = jkv.allocate(jkv.init(config), [0])
    cache, batch = jkv.append(cache, opened.seq_ids, 5, capacity=5)
    state = {"fold": jnp.full((1, 2), 7, jnp.int32)}
    cache = jkv.write_state(cache, 0, batch, state)
    jkv.save(tmp_path / "new", cache, opened.seq_ids)
    metadata, arrays = files.read_file(tmp_path / "new")
    names = {"groups.0.": "states.0.", "groups.1.": "groups.0."}

    def old(name: str) -> str:
        beginning = name[: len("groups.0.")]
        return names.get(beginning, beginning) + name.removeprefix(beginning)

    tensors = {
        old(name): files.Tensor(array.dtype, array.shape, (array,))
        for name, array in arrays.items()
    }
    fields = {old(name): leaf for name, leaf in json.loads(metadata["fields"]).items()}
    header = {"holds": "sequences", "fields": json.dumps(fields)}
    assert any(name.startswith("states.0.") for name in tensors)
    files.write_file(tmp_path / "old", tensors, header)
    back = jkv.load(tmp_path / "old", jkv.init(config))
    wanted = jkv.load(tmp_path / "new", jkv.init(config))
    assert jax.tree.structure(back) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, back, wanted)

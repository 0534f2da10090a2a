"""What version 0.1 wrote is still read: files, and pickled sequences.

The fixtures hold a cache of two layers in float32 with a prefix index. Sequence 0 has
tokens 100 to 108, sequence 1 tokens 109 to 114, sequence 2 is a fork of 0. The keys of
token 100 + i are i in layer 0 and 100 + i in layer 1, its values -i in both.

The files named windowed were written by the code before there were groups of layers.
Its layers see eight tokens. Sequence 0 has tokens 0 to 19, whose keys are their numbers
and whose values are minus those; sequence 1 was closed.
"""

import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
from support.paths import FIXTURES

import jkv

pytestmark = pytest.mark.one_end
WRITTEN = FIXTURES / "version_0_1"


def assert_holds(cache: jkv.Cache, seq_id: int, first: int, count: int) -> None:
    """Check tokens, keys and values of one sequence."""
    numbers = np.arange(first, first + count)
    assert jkv.tokens(cache, seq_id)[:count].tolist() == (100 + numbers).tolist()
    for layer in range(2):
        keys, values, length = jkv.read(cache, layer, seq_id)
        assert int(length) == count
        np.testing.assert_array_equal(keys[:count, 0, 0], numbers + 100 * layer)
        np.testing.assert_array_equal(values[:count, 0, 1], -numbers)


def test_a_cache_is_read() -> None:
    cache = jkv.load(WRITTEN / "cache.safetensors")
    jkv.check(cache)
    for seq_id, first, count in ((0, 0, 9), (1, 9, 6), (2, 0, 9)):
        assert_holds(cache, seq_id, first, count)
    prompt = np.arange(100, 112)[None]
    assert jkv.match(cache, prompt).tolist() == [8]


def test_sequences_are_read_into_a_cache() -> None:
    whole = jkv.load(WRITTEN / "cache.safetensors")
    cache, status = jkv.free(whole, [0, 2])
    cache, back = jkv.load(WRITTEN / "sequences.safetensors", cache)
    jkv.raise_for_status(back)
    for seq_id in back.seq_ids.tolist():
        assert_holds(cache, seq_id, 0, 9)


def test_pickled_sequences_come_back() -> None:
    swapped = pickle.loads((WRITTEN / "swapped.pickle").read_bytes())
    assert isinstance(swapped, jkv.Swapped)
    cache, _ = jkv.free(jkv.load(WRITTEN / "cache.safetensors"), [0, 2])
    cache, back = jkv.swap_in(cache, swapped)
    jkv.raise_for_status(back)
    jkv.check(cache)
    for seq_id in back.seq_ids.tolist():
        assert_holds(cache, seq_id, 0, 9)


def test_a_window_and_its_index_are_read() -> None:
    cache = jkv.load(WRITTEN / "windowed.safetensors")
    jkv.check(cache)
    swapped = pickle.loads((WRITTEN / "windowed.pickle").read_bytes())
    other, _ = jkv.free(cache, 0)
    other, back = jkv.swap_in(other, swapped)
    jkv.raise_for_status(back)
    jkv.check(other)
    for each, seq_id in ((cache, 0), (other, int(back.seq_ids[0]))):
        window = each.metadata.groups[0].window
        assert int(window.gaps_of(np.int32(seq_id))) == 2
        keys, values, length = jkv.read(each, 1, seq_id)
        assert int(length) == 20
        np.testing.assert_array_equal(keys[8:20, 0, 0], np.arange(8, 20))
        np.testing.assert_array_equal(values[8:20, 0, 1], -np.arange(8, 20))
    stats = jkv.stats(cache)
    assert (stats.allocations, stats.frees, stats.evicted_blocks) == (10, 7, 0)
    assert jkv.match(cache, np.arange(21)[None]).tolist() == [20]


def test_a_process_that_imports_only_pickle_reads_them(tmp_path: pathlib.Path) -> None:
    """What version 0.1 pickled, and what is pickled today."""
    old = WRITTEN / "swapped.pickle"
    new = tmp_path / "swapped.pickle"
    new.write_bytes(pickle.dumps(pickle.loads(old.read_bytes())))
    script = (
        "import pickle, sys\n"
        "for path in sys.argv[1:]:\n"
        "    with open(path, 'rb') as file:\n"
        "        print(pickle.load(file))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, old, new],
        cwd=pathlib.Path(jkv.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first == second == repr(pickle.loads(old.read_bytes()))

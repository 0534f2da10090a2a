"""A kind of group that the package does not know, used through its interfaces.

`support.marks` defines it. Beside blocks and states it passes through every verb, to
the host and to a file and back, and no file of the package names it.
"""

import jax
import numpy as np
import pytest
from support.marks import MarkConfig, make_known
from support.small_caches import ROWS, WIDTH, small_config

import jkv

pytestmark = pytest.mark.one_end
SIZES = dict(max_sequences=4, max_context_length=14, block_size=4)
MARKS = 1  # index of the group


@pytest.fixture
def cache(monkeypatch):
    """A state, marks and blocks; two sequences of three tokens, the first of sevens."""
    make_known(monkeypatch)
    state = jkv.StateConfig(num_layers=1, arrays={"s": ((3,), "float32")}, **SIZES)
    marks = MarkConfig(num_layers=2, width=5, **SIZES)
    config = jkv.GroupedConfig(
        groups=(state, marks, small_config()), layer_groups=((0, 1), (1, 2))
    )
    cache = jkv.init(config)
    assert cache.nbytes == config.bytes and "2 layers with marks" in str(config)
    cache, opened = jkv.allocate(cache, padded([0, 0]))
    cache, batch = jkv.append(cache, padded([0, 1], -1), padded([3, 3]), capacity=ROWS)
    rows = np.ones((ROWS, 1, 2), np.float32)
    cache = jkv.commit(jkv.write(cache, 1, batch, rows, rows), batch)
    storage = cache.storage[MARKS]
    rows = storage.rows.at[:, 0].set(7)
    return cache.with_group_storage(MARKS, storage.with_arrays({"rows": rows}))


def padded(numbers, nothing=-1):
    return np.array([*numbers, *[nothing] * (WIDTH - len(numbers))], np.int32)


def marks_of(cache, seq_id):
    rows = np.asarray(cache.storage[MARKS].rows)[:, seq_id]
    assert len({*rows.reshape(-1).tolist()}) == 1
    return int(rows[0, 0])


def test_verbs_move_it_with_its_sequence(cache):
    assert "marks, 2 layers" in repr(cache)
    cache, forked = jkv.fork(cache, padded([0]))
    child = int(forked.seq_ids[0])
    assert [marks_of(cache, i) for i in (0, 1, child)] == [7, 0, 7]
    cache, _ = jkv.reorder(cache, padded([child]), padded([1]))
    assert [marks_of(cache, i) for i in (0, 1, child)] == [7, 0, 0]
    cache, status = jkv.truncate(cache, padded([0]), padded([3], 0))
    jkv.raise_for_status(status)
    cache, _ = jkv.free(cache, padded([0]))
    cache, opened = jkv.allocate(cache, padded([0, 0]))
    assert 0 in opened.seq_ids.tolist() and marks_of(cache, 0) == 0
    jkv.check(jkv.resize(jkv.compact(cache), 12))


def test_it_is_swapped_and_saved(cache, tmp_path):
    cache, swapped = jkv.swap_out(cache, [0])
    cache, back = jkv.swap_in(cache, swapped)
    (seq_id,) = back.seq_ids.tolist()
    assert marks_of(cache, seq_id) == 7
    jkv.save(tmp_path / "cache", cache)
    loaded = jkv.load(tmp_path / "cache")
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    jkv.save(tmp_path / "sequence", cache, [seq_id])
    loaded, back = jkv.load(tmp_path / "sequence", loaded)
    assert marks_of(loaded, int(back.seq_ids[0])) == 7
    jkv.check(loaded)


def test_it_appears_in_host_reports(cache):
    assert jkv.memory_profile(cache).total_bytes == cache.nbytes
    assert tuple(jkv.partition_specs(cache, heads="tp").storage[MARKS].rows) == ()
    watched, _ = jkv.append(jkv.debug(cache), padded([0]))
    assert watched.interceptor is not None
    with pytest.raises(jkv.UsageError, match="and no blocks"):
        jkv.block_ids(cache, 0, group=MARKS)

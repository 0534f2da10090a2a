"""Debug mode reports faults that show only at run time, and costs nothing when off."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_caches import copied, small_cache, small_config

import jkv

LAYERS = 2
IDS = np.array([0, 1], np.int32)


@functools.cache
def config(**changes):
    return small_config(num_layers=LAYERS, **changes)


def watched(**changes):
    """Return a cache in debug mode with two open sequences."""
    cache = jkv.debug(jkv.init(config(**changes)))
    cache, opened = jkv.allocate(cache, np.zeros(2, np.int32))
    jkv.raise_for_status(opened)
    return cache


def rows(batch):
    return jnp.ones((batch.num_rows, 1, 2), jnp.float32)


def write(cache, batch, layers=range(LAYERS)):
    for layer in layers:
        cache = jkv.write(cache, layer, batch, rows(batch), rows(batch))
    return cache


def step(cache):
    """Take a valid step."""
    cache, batch = jkv.append(cache, IDS)
    hidden = 0.0
    for layer in range(LAYERS):
        cache = jkv.write(cache, layer, batch, rows(batch), rows(batch))
        hidden += jkv.attend(cache, layer, batch, rows(batch)).sum()
    return jkv.commit(cache, batch), hidden, batch.status


def found_by(cache):
    """Return the findings of `check`, which raises only once."""
    with pytest.raises(jkv.DebugError) as caught:
        jkv.check(cache)
    jkv.check(cache)
    return caught.value.findings


@functools.partial(jax.jit, donate_argnums=0)
def run(cache):
    """Take steps in a scan, like a decoding loop."""

    def body(cache, _):
        cache, hidden, _ = step(cache)
        return cache, hidden

    return jax.lax.scan(body, cache, length=3)


@pytest.mark.one_end
def test_a_valid_program_has_no_findings():
    cache = watched(prefix_caching=True)
    cache, _ = run(cache)
    cache, forked = jkv.fork(cache, IDS)
    jkv.raise_for_status(forked)
    jkv.check(cache)
    cache, status = jkv.free(cache, IDS)
    assert jkv.context_lengths(cache).tolist() == [0, 0, 3, 3]
    assert jkv.stats(cache).live_sequences == 2
    jkv.check(cache)


def test_debug_mode_off_leaves_no_trace_in_the_program():
    cache = jax.eval_shape(lambda: jkv.init(config()))

    def trace(cache):
        return str(jax.make_jaxpr(lambda cache: step(cache))(cache))

    plain, on = jkv.init(config()), jkv.debug(jkv.init(config()))
    assert "debug_callback" not in trace(cache) and "debug_callback" in trace(on)
    assert trace(jkv.debug(on, enabled=False)) == trace(plain) == trace(cache)
    assert len(jax.tree.leaves(plain)) == len(config().arrays)


@pytest.mark.one_end
def test_a_plain_cache_never_runs_debug_code(monkeypatch):
    from jkv.inspection import debugging

    for name in ("StepWatcher", "_Step", "_LOOKS", "_look_at_append"):
        monkeypatch.delattr(debugging, name)
    jax.eval_shape(lambda: step(jkv.init(config())))


@pytest.mark.parametrize("layer", [-1, LAYERS])
@pytest.mark.one_end
def test_an_invalid_traced_layer(layer, caplog):
    cache = watched()

    def body(cache, layer):
        cache, batch = jkv.append(cache, IDS)
        return write(cache, batch, [layer]), batch.status

    with caplog.at_level(logging.ERROR, logger="jkv"):
        cache, _ = jax.jit(body, donate_argnums=0)(cache, jnp.int32(layer))
        (finding,) = found_by(cache)
    assert "write with a layer that does not exist" in finding and __file__ in finding
    assert "does not exist" in caplog.text


@pytest.mark.newest_further
def test_a_layer_written_twice_or_not_at_all():
    cache = watched()

    @functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
    def step(cache, layers):
        cache, batch = jkv.append(cache, IDS)
        return write(cache, batch, layers), batch.status

    cache, _ = step(cache, (0, 1, 1))
    (finding,) = found_by(cache)
    assert "write to layer 1 for the second time" in finding
    cache, _ = step(cache, (0,))
    jkv.check(cache)
    cache, _ = step(cache, (0, 1))
    (finding,) = found_by(cache)
    assert "before its last step was written to all layers" in finding


@pytest.mark.one_end
def test_truncated_slots_need_no_write():
    cache = watched()
    lengths = jkv.context_lengths(cache)[jnp.asarray(IDS)]
    cache, batch = jkv.append(cache, IDS)
    jkv.raise_for_status(batch)
    cache, _ = jkv.truncate(cache, IDS, lengths)
    cache, batch = jkv.append(cache, IDS)
    jkv.raise_for_status(batch)
    jkv.check(cache)


@pytest.mark.one_end
def test_tokens_passed_to_a_cache_that_records_none():
    cache, opened = jkv.allocate(watched(), [0], tokens=[[5]])
    jkv.raise_for_status(opened)
    (finding,) = found_by(cache)
    assert "allocate(tokens=) is ignored" in finding


def test_attending_before_writing():
    cache = watched()

    @functools.partial(jax.jit, donate_argnums=0)
    def wrong(cache):
        cache, batch = jkv.append(cache, IDS)
        hidden = jkv.attend(cache, 1, batch, rows(batch))
        return write(cache, batch), hidden, batch.status

    for _ in range(2):
        cache, _, _ = wrong(cache)
    (finding,) = found_by(cache)
    assert "attend reads layer 1 before this step" in finding and "2 times" in finding
    assert f"{__file__}:" in finding


@pytest.mark.one_end
def test_a_batch_of_another_cache_with_equal_sizes():
    cache, other = watched(), watched()
    _, batch = jkv.append(other, IDS)
    _, unwatched = jkv.append(jkv.debug(other, enabled=False), IDS)
    for wrong in (batch, unwatched):
        for verb in (
            lambda c, b: jkv.write(c, 0, b, rows(b), rows(b)),
            lambda c, b: jkv.attend(c, 0, b, rows(b)),
            jkv.commit,
        ):
            with pytest.raises(ValueError, match="on another cache"):
                verb(cache, wrong)


@pytest.mark.one_end
def test_a_stale_batch_of_a_reused_row_is_reported():
    cache = watched()
    cache, batch = jkv.append(cache, IDS)
    cache, _ = jkv.free(cache, 0)
    cache, opened = jkv.allocate(cache, np.zeros(3, np.int32))
    assert opened.seq_ids.tolist() == [2, 3, 0]
    write(cache, batch, [0])
    (finding,) = found_by(jkv.free(cache, 3)[0])
    assert "write with a batch of a sequence that was freed" in finding


@pytest.mark.one_end
def test_uncommitted_steps():
    cache = watched(prefix_caching=True)
    for _ in range(2):
        cache, batch = jkv.append(cache, IDS)
        cache = write(cache, batch)
    finding, _copied = sorted(found_by(cache))
    assert "before its last step was committed" in finding
    assert "commit(cache, batch)" in finding


@pytest.mark.one_end
def test_a_commit_before_all_layers_are_written():
    cache = watched(prefix_caching=True)
    cache, batch = jkv.append(cache, IDS)
    cache = jkv.commit(write(cache, batch, [0]), batch)
    assert any("written to all layers" in text for text in found_by(cache))


def test_an_undonated_pool():
    def fill(cache):
        return cache.with_storage(jax.tree.map(lambda pool: pool + 1, cache.storage))

    cache = jax.jit(fill)(watched())
    (finding,) = found_by(cache)
    assert "not donated" in finding
    jkv.check(jax.jit(fill, donate_argnums=0)(cache))


@pytest.mark.one_end
def test_refusals_are_not_findings():
    """The caller may ignore a status; the cache counts refusals."""
    cache, opened = jkv.allocate(watched(), np.zeros(3, np.int32))
    assert opened.status.tolist() == [0, 0, 2]
    cache, _ = jkv.append(cache, np.array([9], np.int32))
    jkv.check(cache)
    refused = {cause for cause, n in jkv.stats(cache).refusals.items() if n}
    assert refused == {jkv.Status.INVALID_SEQUENCE, jkv.Status.OUT_OF_SEQUENCES}


@pytest.mark.one_end
def test_other_verbs_and_files_accept_a_debugged_cache(tmp_path):
    cache, _ = jkv.append(watched(), IDS)
    jkv.save(tmp_path / "cache", cache)
    assert jkv.load(tmp_path / "cache").interceptor is None
    cache, swapped = jkv.swap_out(cache, 0)
    cache, back = jkv.swap_in(cache, swapped)
    jkv.raise_for_status(back)
    assert jkv.memory_profile(cache).total_bytes == config().bytes
    assert repr(cache).startswith("Cache(2 layers")
    assert jkv.compact(cache).interceptor.watch is cache.interceptor.watch


@pytest.mark.one_end
def test_it_is_enabled_only_outside_jit():
    with pytest.raises(ValueError, match="outside jit"):
        jax.eval_shape(jkv.debug, small_cache())
    with pytest.raises(TypeError, match="verbs return a pair"):
        jkv.debug((copied(small_cache()), None))

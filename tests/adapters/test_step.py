"""Step: any layout of rows, vmap, nested traces, and shared keys."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.jax_versions import dealt
from support.tolerances import assert_close

import jkv

LAYERS, HEADS, KV_HEADS, DIM, ROWS = 2, 4, 2, 8, 5
CONFIG = jkv.CacheConfig.toy(num_layers=LAYERS, num_kv_heads=KV_HEADS, dtype="float32")
GROUPS = HEADS // KV_HEADS
SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)


@functools.cache
def make_rows():
    """Return queries, keys and values of two interleaved sequences."""
    rng = np.random.default_rng(0)
    shapes = [(ROWS, each, DIM) for each in (HEADS, KV_HEADS, KV_HEADS)]
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def begin():
    cache, opened = jkv.allocate(jkv.init(CONFIG), [0, 0])
    return jkv.append(cache, opened.seq_ids, [3, 2], capacity=ROWS)


@functools.cache
def attend_plainly(sinks=False):
    """Return the cache and the last layer's heads by the verbs."""
    cache, batch = begin()
    queries, keys, values = make_rows()
    for layer in range(LAYERS):
        cache = jkv.write(cache, layer, batch, keys * np.float32(layer + 1), values)
        heads = jkv.attend(
            cache, layer, batch, queries, sinks=jnp.asarray(SINKS) if sinks else None
        )
    return cache, heads


def by_heads(attend, queries, keys, values, **given):
    """Map over the kv heads, one head [..., R, 1, D] each."""
    groups = queries.reshape(*queries.shape[:-2], KV_HEADS, GROUPS, DIM)
    axes = queries.ndim - 2
    mapped = jax.vmap(attend, in_axes=axes, out_axes=axes)
    heads = mapped(groups, keys[..., None, :], values[..., None, :], **given)
    return heads.reshape(queries.shape)


def of_queries(attend, queries, keys, values):
    """Map over query heads that share their keys."""
    groups = queries.reshape(ROWS, KV_HEADS, GROUPS, DIM)
    mapped = jax.vmap(attend, in_axes=(2, None, None), out_axes=2)
    return mapped(groups, keys, values).reshape(queries.shape)


def with_axis(axis):
    """Attend in the layout [1, R] or [R, 1]."""

    def attend(step, *rows):
        return step.attend(*(jnp.expand_dims(each, axis) for each in rows))

    return attend


WAYS = {
    "packed": lambda step, *rows: step.attend(*rows),
    "sequence": with_axis(0),
    "batch": with_axis(1),
    "vmap of rows": lambda step, *rows: jax.vmap(step.attend)(
        *(each[:, None] for each in rows)
    ),
    "vmap of the one sequence": lambda step, *rows: jax.vmap(step.attend)(
        *(each[None] for each in rows)
    ),
    "vmap of heads": lambda step, *rows: by_heads(step.attend, *rows),
    "vmap of query heads": lambda step, *rows: of_queries(step.attend, *rows),
    "vmap of heads in rows": lambda step, *rows: jax.vmap(
        lambda *rows: by_heads(step.attend, *rows)
    )(*(each[:, None] for each in rows)),
    "vmap of heads in a sequence": lambda step, *rows: jax.vmap(
        lambda *rows: by_heads(step.attend, *rows)
    )(*(each[None] for each in rows)),
}


def play(attend):
    """Return the cache and the heads after calling `attend` for each layer."""

    def run(queries, keys, values):
        cache, batch = begin()
        step = jkv.Step(cache, batch)
        for layer in range(LAYERS):
            heads = attend(step, queries, keys * np.float32(layer + 1), values)
        return step.cache, heads.reshape(ROWS, HEADS, DIM)

    return jax.jit(run)(*make_rows())


@pytest.mark.newest_further
@pytest.mark.parametrize("way", dealt(WAYS))
def test_rows_in_any_layout_and_under_vmap(way):
    cache, heads = play(WAYS[way])
    wanted, attended = attend_plainly()
    assert_close(heads, attended)
    for ours, theirs in zip(
        *map(jax.tree.leaves, (cache.storage, wanted.storage)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("way", ["query heads", "rows outside"])
def test_as_many_rows_as_mapped_heads(way):
    """Axes that share keys are heads, and of the others the outermost are rows."""
    num_rows = {"query heads": GROUPS, "rows outside": KV_HEADS}[way]
    cache, opened = jkv.allocate(jkv.init(CONFIG), [0])
    cache, batch = jkv.append(cache, opened.seq_ids, num_rows, capacity=num_rows)
    queries, keys, values = (each[:num_rows] for each in make_rows())
    wanted = jkv.attend(jkv.write(cache, 0, batch, keys, values), 0, batch, queries)
    step = jkv.Step(cache, batch)
    groups = queries.reshape(num_rows, KV_HEADS, GROUPS, DIM)

    def attend(*rows):
        return step.attend(*(each[None] for each in rows))[0]

    if way == "query heads":  # [G, R, K, D]
        mapped = jax.vmap(jax.vmap(attend), in_axes=(2, None, None), out_axes=2)
        heads = mapped(groups, keys, values)
    else:  # [R, K, G, D]
        heads = jax.vmap(by_kv_head(step.attend))(groups, keys, values)
    assert_close(heads.reshape(num_rows, HEADS, DIM), wanted)


def by_kv_head(attend):
    """Map one row over its kv heads."""
    return jax.vmap(lambda q, k, v: attend(q[None], k[None, None], v[None, None])[0])


def test_sinks_are_mapped_with_their_heads():
    sinks = jnp.asarray(SINKS).reshape(KV_HEADS, GROUPS)

    def attend(step, queries, keys, values):
        mapped = jax.vmap(
            lambda *rows: step.attend(*rows[:3], sinks=rows[3]),
            in_axes=(1, 1, 1, 0),
            out_axes=1,
        )
        groups = queries.reshape(ROWS, KV_HEADS, GROUPS, DIM)
        heads = mapped(groups, keys[:, :, None], values[:, :, None], sinks)
        return heads.reshape(queries.shape)

    assert_close(play(attend)[1], attend_plainly(sinks=True)[1])


def test_a_scan_over_layers_uses_one_step_per_trip():
    """The layer index is traced."""

    @jax.jit
    def run(queries, keys, values):
        cache, batch = begin()

        def run_layer(carry, layer):
            step = jkv.Step(carry[0], batch)
            factor = (layer + 1).astype(jnp.float32)
            heads = step.attend(queries, keys * factor, values, layer=layer)
            return (step.cache, heads), None

        layers = jnp.arange(LAYERS, dtype=jnp.int32)
        return jax.lax.scan(run_layer, (cache, jnp.zeros_like(queries)), layers)[0]

    cache, heads = run(*make_rows())
    assert_close(heads, attend_plainly()[1])
    assert_close(cache.storage[0].key_pool, attend_plainly()[0].storage[0].key_pool)


def scan_layers(step, queries, keys, values):
    """Scan over layers, with a jitted layer inside."""

    @jax.jit
    def run_layer(_, factor):
        return step.attend(queries, keys * factor, values), None

    factors = jnp.arange(1, LAYERS + 1, dtype=jnp.float32)
    return jax.lax.scan(run_layer, jnp.zeros_like(queries), factors)[0]


def test_traced_inlines_jit_and_unrolls_scans():
    @jax.jit
    def run(*rows):
        step = jkv.Step(*begin())
        with step.traced() as same:
            assert same is step
            heads = nnx.jit(lambda *rows: scan_layers(step, *rows))(*rows)
        return step.cache, heads

    cache, heads = run(*make_rows())
    assert_close(heads, attend_plainly()[1])
    assert_close(cache.storage[0].key_pool, attend_plainly()[0].storage[0].key_pool)


class Scanned(nn.Module):
    """A flax.linen scan over layers."""

    step: object

    @nn.compact
    def __call__(self, rows):
        def body(_, carry, factor):
            return self.step.attend(carry, rows[1] * factor, rows[2]), None

        scan = nn.scan(body, variable_broadcast="params", split_rngs={})
        return scan(self, rows[0], jnp.ones(LAYERS))[0]


FOREIGN = {
    "jit": lambda step, *rows: jax.jit(step.attend)(*rows),
    "scan": scan_layers,
    "cond": lambda step, *rows: jax.lax.cond(
        rows[0][0, 0, 0] > 0, lambda: step.attend(*rows), lambda: rows[0]
    ),
    "checkpoint": lambda step, *rows: jax.checkpoint(step.attend)(*rows),
    "jit in vmap": lambda step, *rows: jax.vmap(jax.jit(step.attend))(
        *(each[None] for each in rows)
    ),
    "nnx.remat, traced": lambda step, *rows: nnx.remat(
        lambda *rows: step.attend(*rows)
    )(*rows),
    "nn.scan, traced": lambda step, *rows: Scanned(step).apply({}, rows),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_traces_are_refused_with_the_fix(name):
    def run(*rows):
        step = jkv.Step(*begin())
        if name.endswith("traced"):
            with step.traced():
                return FOREIGN[name](step, *rows)
        return FOREIGN[name](step, *rows)

    with pytest.raises(jkv.UsageError, match=r"step\.traced\(\).*nnx\.remat.*linen"):
        jax.eval_shape(run, *make_rows())


MISTAKES = {
    "got \\[4, 4, 8\\]": lambda step, q, k, v: step.attend(q[:4], k, v),
    "keys must be": lambda step, q, k, v: step.attend(q, k[:2], v[:2]),
    "pass a row as \\[1, heads": lambda step, *rows: jax.vmap(step.attend)(*rows),
    "layer, scale and window": lambda step, q, k, v: jax.vmap(
        lambda q, k, v, w: step.attend(q, k, v, window=w)
    )(q[:, None], k[:, None], v[:, None], jnp.arange(ROWS)),
    "keys and values alike": lambda step, q, k, v: jax.vmap(
        step.attend, in_axes=(1, 1, None)
    )(q[:, :KV_HEADS, None], k[:, :, None], v),
    "a row for each row of the batch": lambda step, *rows: step.last(rows[0]),
}


@pytest.mark.parametrize("message", MISTAKES)
@pytest.mark.one_end
def test_invalid_calls_are_refused(message):
    def run(queries, keys, values):
        return MISTAKES[message](jkv.Step(*begin()), queries, keys, values)

    with pytest.raises(jkv.UsageError, match=message):
        jax.eval_shape(run, *make_rows())


@pytest.mark.one_end
def test_a_cache_and_a_batch_are_required():
    cache, batch = begin()
    with pytest.raises(jkv.UsageError, match="must be a jkv.Cache and a jkv.Batch"):
        jkv.Step(batch, cache)


@pytest.mark.one_end
def test_layers_share_keys_and_masks_apply():
    """Without keys a layer reads another one's; a mask other than causal applies."""
    queries, keys, values = make_rows()
    cache, batch = begin()
    span = jkv.with_mask(batch, jkv.SpanMask(jnp.array([2, 2, 2, 1, 1], jnp.int32)))
    step = jkv.Step(cache, span)
    step.attend(queries, keys, values)
    shared = step.attend(queries, None, layer=0)
    assert_close(shared, jkv.attend(step.cache, 0, span, queries))
    causal = step.attend(queries, None, layer=0, causal=True)
    assert_close(causal, jkv.attend(step.cache, 0, batch, queries))
    assert not np.allclose(shared, causal)

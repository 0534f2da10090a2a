"""A two-layer model with heads that a mesh can shard, and its caches."""

import collections
import functools
import math
import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jkv
from support.compiled_hlo import ALL_PASSES
from support.tolerances import TOLERANCE

NUM_LAYERS, NUM_HEADS, HEAD_DIM, WIDTH, VOCABULARY = 2, 16, 16, 24, 32
NUM_ROWS = 12
# Prefill chunks of three prompts, then decode steps; some sequences are idle.
STEPS = [[5, 4, 3], [1, 1, 1], [0, 7, 1], [1, 1, 0]]
NUM_KV_HEADS = {"sharded": 8, "repeated": 2, "latent": 1}


class Layout(NamedTuple):
    """A cache's device layout and stored dtypes."""

    heads: str  # a key of NUM_KV_HEADS
    axes: tuple[tuple[str, int], ...]  # of the mesh: heads "tp", tokens of blocks "cp"
    axis_type: AxisType
    dtype: str = "float32"

    @property
    def mesh(self):
        """The mesh over the first devices."""
        names, sizes = zip(*self.axes, strict=True)
        count = math.prod(sizes)
        devices = np.asarray(jax.devices()[:count]).reshape(sizes)
        return jax.sharding.Mesh(devices, names, (self.axis_type,) * len(names))

    @property
    def config(self):
        """The configuration of its cache."""
        is_latent = self.heads == "latent"
        return jkv.CacheConfig(
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS[self.heads],
            head_dim=HEAD_DIM,
            value_head_dim=8 if is_latent else None,
            values_in_keys=is_latent,
            num_blocks=8209,  # so that no other array is as large as the pool
            block_size=4,
            max_sequences=4,
            max_context_length=32,
            dtype=self.dtype,
        )

    @property
    def where(self):
        """The sharded dimensions by axis, as arguments of `init`."""
        names = {"heads": "tp", "context": "cp"}
        return {what: axis for what, axis in names.items() if axis in dict(self.axes)}

    @property
    def num_shares(self):
        """The number of shards of the storage."""
        return math.prod(size for name, size in self.axes if name != "dp")

    def init(self):
        """Create a cache on the mesh."""
        return jkv.init(self.config, mesh=self.mesh, **self.where)


AUTO = Layout("sharded", (("tp", 8),), AxisType.Auto)
REPEATED = Layout("repeated", (("tp", 8),), AxisType.Auto, "int8")
TWO_AXES = Layout("sharded", (("dp", 2), ("tp", 4)), AxisType.Explicit)
TOKENS = Layout("sharded", (("cp", 4),), AxisType.Auto)


@functools.cache
def make_weights(num_kv_heads, value_dim):
    """Return the model's weights on the host."""
    rng = np.random.default_rng(num_kv_heads)

    def draw(fan_in, *shape):
        return (rng.standard_normal(shape) / math.sqrt(fan_in)).astype(np.float32)

    return {
        "embedding": draw(1, VOCABULARY, WIDTH),
        "queries": draw(WIDTH, NUM_LAYERS, WIDTH, NUM_HEADS, HEAD_DIM),
        "keys": draw(WIDTH, NUM_LAYERS, WIDTH, num_kv_heads, HEAD_DIM),
        "values": draw(WIDTH, NUM_LAYERS, WIDTH, num_kv_heads, value_dim),
        "outputs": draw(NUM_HEADS * value_dim, NUM_LAYERS, NUM_HEADS, value_dim, WIDTH),
    }


def place_weights(layout):
    """Place the weights on the mesh; heads are sharded if an axis has them."""
    weights = make_weights(layout.config.num_kv_heads, layout.config.value_head_dim)
    specs = dict.fromkeys(weights, PartitionSpec())
    if "heads" in layout.where:
        specs["queries"] = PartitionSpec(None, None, "tp")
        specs["outputs"] = PartitionSpec(None, "tp")
    if "heads" in layout.where and layout.heads == "sharded":
        specs["keys"] = specs["values"] = PartitionSpec(None, None, "tp")
    mesh = layout.mesh
    return {
        name: jax.device_put(array, NamedSharding(mesh, specs[name]))
        for name, array in weights.items()
    }


def run_model(weights, tokens, cache, batch, *, implementation=None, axis=None):
    """Run the model (`jkv.Model`); inside `shard_map`, sum over `axis`."""
    mesh = jax.typeof(weights["queries"]).sharding.mesh
    whole = {}
    if AxisType.Explicit in mesh.axis_types and axis is None:
        whole = {"out_sharding": NamedSharding(mesh, PartitionSpec())}
    hidden = weights["embedding"].at[tokens].get(mode="clip")

    def run_layer(carry, given):
        cache, hidden = carry
        layer, weights = given
        queries, keys, values = (
            jnp.einsum("re,ehd->rhd", hidden, weights[name])
            for name in ("queries", "keys", "values")
        )
        if cache.storage[0].value_pool is None:
            values = None
        cache = jkv.write(cache, layer, batch, keys, values)
        found = jkv.attend(cache, layer, batch, queries, implementation=implementation)
        # The only collective of a layer: each device has the sum over its own heads.
        found = jnp.einsum("rhd,hde->re", found, weights["outputs"], **whole)
        if axis is not None:
            found = jax.lax.psum(found, axis)
        return (cache, hidden + found), None

    layers = {name: weights[name] for name in ("queries", "keys", "values", "outputs")}
    numbers = jnp.arange(NUM_LAYERS, dtype=jnp.int32)
    (cache, hidden), _ = jax.lax.scan(run_layer, (cache, hidden), (numbers, layers))
    hidden = hidden.at[batch.last_rows].get(mode="clip")
    logits = jnp.einsum("be,ve->bv", hidden, weights["embedding"])
    return logits / np.float32(math.sqrt(WIDTH)), cache


def take_step(cache, weights, seq_ids, counts, tokens, implementation=None):
    """Take a step: append, model, commit."""
    cache, batch = jkv.append(cache, seq_ids, counts, capacity=NUM_ROWS)
    logits, cache = run_model(
        weights, tokens, cache, batch, implementation=implementation
    )
    return jkv.commit(cache, batch), logits


def play(cache, weights, step):
    """Take the steps of STEPS; return the cache and the logits of each."""
    cache, opened = jkv.allocate(cache, [0, 0, 0])
    rng = np.random.default_rng(0)
    found = []
    for counts in STEPS:
        tokens = rng.integers(VOCABULARY, size=NUM_ROWS).astype(np.int32)
        counts = np.asarray(counts, np.int32)
        cache, logits = step(cache, weights, opened.seq_ids, counts, tokens)
        found.append(np.where(counts[:, None] > 0, np.asarray(logits), 0))
    return cache, np.stack(found)


def compile_step(cache, weights):
    """Compile the step with a donated cache."""
    rows = np.zeros(3, np.int32), np.zeros(3, np.int32), np.zeros(NUM_ROWS, np.int32)
    step = jax.jit(chex.assert_max_traces(take_step, n=1), donate_argnums=0)
    return step.lower(cache, weights, *rows).compile(ALL_PASSES)


@functools.cache
def compile_alone(config):
    """Return the step compiled for one device, and its weights."""
    weights = jax.device_put(make_weights(config.num_kv_heads, config.value_head_dim))
    return compile_step(jkv.init(config), weights), weights


@functools.cache
def play_alone(config):
    """Return one device's cache and logits."""
    step, weights = compile_alone(config)
    return play(jkv.init(config), weights, step)


COLLECTIVE = re.compile(
    r"= (.+?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|"
    r"collective-broadcast)(?:-start)?\("
)
ARRAY = re.compile(r"\w+\[[\d,]*\]")


def collectives(compiled):
    """Count the collectives of a compiled module, by name and arrays."""
    found = COLLECTIVE.findall(compiled.as_text())
    return collections.Counter(
        (name, re.sub(r"\{.*?\}", "", kind)) for kind, name in found
    )


def arrays_joined(compiled):
    """Count the arrays of all-reduces one by one: XLA combines simultaneous ones."""
    found = collectives(compiled)
    assert {name for name, _ in found} == {"all-reduce"}
    return collections.Counter(
        array for (_, kind) in found.elements() for array in ARRAY.findall(kind)
    )


def joined(num_rows, num_heads, value_dim):
    """Return the collectives of an attend: maxima, and totals with weighted values."""
    rows = f"f32[{num_rows},{num_heads}]"
    values = f"f32[{num_rows},{num_heads},{value_dim + 1}]"
    return collections.Counter({rows: 1, values: 1})


def assert_near(found, wanted, dtype):
    """Assert that two results of a model agree within this stored dtype's tolerance.

    Several devices add up heads in another order, so quantized values may round
    differently.
    """
    tolerance = TOLERANCE[dtype if dtype in TOLERANCE else "bfloat16"]
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    np.testing.assert_allclose(found, wanted, rtol=4 * tolerance, atol=4 * tolerance)

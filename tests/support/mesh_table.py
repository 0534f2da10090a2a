"""Functions on meshes: one call for each row of the table in docs/how-to/sharding.md.

Each takes caches, prompts and weights, and returns the cache and arrays that must be
equal on all devices.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jkv
from jkv.decoding import DraftModel, PromptLookup
from jkv.serving import Engine
from support.models.small_attention_model import (
    DIM,
    KV_HEADS,
    LAYERS,
    attention_model,
    attention_params,
)
from support.tolerances import TOLERANCE

# The first prompt repeats itself (for prompt lookup) and is longer than the window.
PROMPTS = np.array([[5, 9, 5, 9, 5, 9, 5, 9, 5], [11, 7, 3, 8] + [-1] * 5], np.int32)
CONTINUATIONS = np.array([[3, 1, 4], [1, 5, -1]], np.int32)
NEW_TOKENS = 6
CONFIG = jkv.CacheConfig(
    num_layers=LAYERS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    num_blocks=20,
    block_size=4,
    max_sequences=6,
    max_context_length=24,
    dtype="float32",
)
WINDOW = 6
windowed_model = functools.partial(attention_model, window=WINDOW)
CHANGES = {
    "int8": {"dtype": "int8"},
    "float8_e4m3fn": {"dtype": "float8_e4m3fn"},
    "float8_e5m2": {"dtype": "float8_e5m2"},
    "int8 and int4": {"dtype": "int8", "value_dtype": "int4"},
    "window and index": {"sliding_window": WINDOW, "prefix_caching": True},
}
# Columns of the table: the mesh axes of a cache.
COLUMNS = {
    "heads": dict(heads="tp"),
    "context": dict(context="cp"),
    "heads and context": dict(heads="tp", context="cp"),
    "pools": dict(pools="dp", heads="tp"),
}


def score(params, prompts, continuations=CONTINUATIONS, **where):
    """Return log-probabilities, without a given cache."""
    return jkv.score(
        attention_model, params, prompts, continuations, config=CONFIG, **where
    )


def differentiate(params, prompts, **where):
    """Return the gradient of the scores with respect to all weights."""

    def loss(params):
        return jnp.sum(jnp.sin(score(params, prompts, **where)))

    return jax.grad(loss)(params)


def extend(cache, prompts, params):
    """Run two turns of two chats."""
    cache, opened = jkv.allocate(cache, [0, 0])
    found = []
    for rows in (prompts, prompts[:, :3]):
        cache, result = jkv.extend(
            attention_model,
            params,
            cache,
            opened.seq_ids,
            rows,
            max_new_tokens=4,
        )
        found += [result.tokens, result.logprobs]
    return jkv.free(cache, opened.seq_ids)[0], found


def beam_search(cache, prompts, params):
    """Search with two beams per prompt."""
    cache, result = jkv.beam_search(
        attention_model,
        params,
        cache,
        prompts,
        num_beams=2,
        num_return=2,
        max_new_tokens=NEW_TOKENS,
        chunk_size=8,
    )
    return cache, (result.tokens, result.scores)


def generate(cache, prompts, params, *, model=attention_model, **options):
    """Continue both prompts in one call."""
    cache, result = jkv.generate(
        model,
        params,
        cache,
        prompts,
        max_new_tokens=NEW_TOKENS,
        max_running=2,
        row_counts=(8,),
        **options,
    )
    found = [result.tokens, result.logprobs]
    if "speculate" in options:
        found.append(result.statistics.accepted_tokens > 0)
    if model is windowed_model:
        found.append(result.statistics.cached_tokens)
    return cache, found


def make_draft(params):
    """Return a draft model that equals the target model."""
    return DraftModel(model=attention_model, params=params, config=CONFIG, num_tokens=2)


def draft(cache, prompts, params):
    """Generate with draft tokens of a draft model, whose layers are in the cache."""
    return generate(cache, prompts, params, speculate=make_draft(params))


def look_up(cache, prompts, params):
    """Generate with draft tokens of prompt lookup."""
    speculate = PromptLookup(num_tokens=2, min_ngram=1, cost=1.0)
    return generate(cache, prompts, params, speculate=speculate)


def generate_again(cache, prompts, params):
    """Generate with a window that releases blocks, twice for prefix cache hits."""
    return generate(cache, prompts, params, model=windowed_model)


def serve(cache, prompts, params):
    """Generate with an engine."""
    engine = Engine(
        attention_model,
        params,
        cache,
        max_running=2,
        max_new_tokens=NEW_TOKENS,
        max_prompt_tokens=9,
        num_steps=3,
        row_counts=(8,),
        checks=True,
    )
    with engine:
        found = engine.generate(prompts)
        tokens = np.array([each.tokens for each in found], np.int32)
        return engine.cache, (tokens, np.array([each.logprobs for each in found]))


PLAYS = {
    "score": score,
    "score, its derivative": differentiate,
    "extend": extend,
    "beam_search": beam_search,
    "generate": generate,
    "debug": generate,
    "DraftModel": draft,
    "PromptLookup": look_up,
    "int8": generate,
    "float8_e4m3fn": generate,
    "float8_e5m2": generate,
    "int8 and int4": generate,
    "window and index": generate_again,
    "Engine": serve,
}
# Functions without a `pools` argument: each rank has its own arguments (`over_pools`).
BY_RANK = ("extend", "beam_search")


class Place(NamedTuple):
    """Placement of a row: on a mesh, or on one device."""

    where: dict[str, str]  # mesh axes by sharded dimension

    @property
    def mesh(self):
        """A mesh with two devices per axis."""
        names = tuple(self.where.values())
        devices = np.asarray(jax.devices()[: 2 ** len(names)])
        axis_types = (AxisType.Auto,) * len(names)
        return jax.sharding.Mesh(
            devices.reshape((2,) * len(names)), names, axis_types=axis_types
        )

    def init(self, config, **left_out):
        """Create a cache."""
        if not self.where:
            return jkv.init(config)
        where = {n: axis for n, axis in self.where.items() if n not in left_out}
        return jkv.init(config, mesh=self.mesh, **where)

    def place_params(self):
        """Place the weights; projections are sharded by heads if an axis has them."""
        params = attention_params()
        if not self.where:
            return params
        params = jax.device_put(params, NamedSharding(self.mesh, PartitionSpec()))
        if "heads" in self.where:
            by_heads = PartitionSpec(None, None, self.where["heads"])
            layers = NamedSharding(self.mesh, by_heads)
            params = params | {"layers": jax.device_put(params["layers"], layers)}
        return params

    def play(self, row):
        """Return a row's results on the host, and its cache or None.

        Args:
            row: of the table.
        """
        config = dataclasses.replace(CONFIG, **CHANGES.get(row, {}))
        function, params = PLAYS[row], self.place_params()
        if function in (score, differentiate):
            return None, self._play_without_cache(function, params)
        if function is draft:
            config = jkv.with_drafter(config, make_draft(params))
        cache = self.init(config)
        if row == "debug":
            cache = jkv.debug(cache)
        if function is serve:
            return serve(cache, PROMPTS, params)
        if row in BY_RANK and cache.pools is not None:
            return self._play_on_ranks(function, cache, params)
        run = jax.jit(function, donate_argnums=0)
        if function is generate_again:
            cache, _ = run(cache, PROMPTS, params)
        return run(cache, PROMPTS, params)

    def _play_without_cache(self, function, params):
        """Return scores; with ranks, each has its own sequences."""
        if "pools" not in self.where:
            heads = self.where.get("heads")
            where = {} if heads is None else dict(mesh=self.mesh, heads=heads)
            return jax.jit(functools.partial(function, **where))(params, PROMPTS)
        ranks, whole = PartitionSpec(self.where["pools"]), PartitionSpec()

        def on_ranks(params):
            return jax.shard_map(
                score,
                mesh=self.mesh,
                in_specs=(whole, ranks, ranks),
                out_specs=ranks,
                axis_names={self.where["pools"]},
            )(params, PROMPTS, CONTINUATIONS)

        if function is score:
            return jax.jit(on_ranks)(params)
        loss = jax.grad(lambda params: jnp.sum(jnp.sin(on_ranks(params))))
        return jax.jit(loss)(params)

    def _play_on_ranks(self, function, cache, params):
        """Run on two ranks; the second has the prompts in reverse order."""

        def step(cache, prompts, *, params):
            return function(cache, prompts, params)

        prompts = np.stack([PROMPTS, PROMPTS[::-1]])
        over = jax.jit(jkv.over_pools(step))
        cache, found = over(cache, prompts, params=params)
        first, second = (
            jax.tree.map(lambda leaf, rank=rank: np.asarray(leaf)[rank], found)
            for rank in range(2)
        )
        for ours, theirs in zip(*map(jax.tree.leaves, (first, second)), strict=True):
            assert_alike(ours, theirs[::-1], TOLERANCE["float32"])
        return cache, first


@functools.cache
def play_alone(row):
    """Return one device's results, as leaves on the host."""
    _, found = Place({}).play(row)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def assert_cell(row, column):
    """Assert that a row's results on a mesh equal one device's."""
    place = Place(COLUMNS[column])
    cache, found = place.play(row)
    # Sums over heads are added in another order, so quantized values may round
    # differently.
    dtype = CHANGES.get(row, {}).get("dtype")
    tolerance = 10 * TOLERANCE["bfloat16" if dtype else "float32"]
    leaves = jax.tree.leaves(found)
    for ours, theirs in zip(leaves, play_alone(row), strict=True):
        assert_alike(np.asarray(ours), theirs, tolerance)
    if cache is None:
        return
    if cache.pools is None:
        caches = [cache]
        wanted = tuple(place.where.get(name) for name in ("heads", "context"))
        for storage in cache.storage:  # the model's layers, and a drafter's
            assert (storage.sharding.heads, storage.sharding.context) == wanted
    else:
        caches = jkv.split_pools(cache)
        assert all(jkv.stats(each).allocations > 0 for each in caches)
    for each in caches:
        jkv.check(each)
        assert int(jkv.num_free_blocks(each)) == CONFIG.num_blocks


def assert_alike(ours, theirs, tolerance):
    """Assert equal integers and close floats; some nonzero, and not all rows alike."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert theirs.any()
    if not np.issubdtype(theirs.dtype, np.floating):
        np.testing.assert_array_equal(ours, theirs)
        return
    bounds = dict(rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(ours, theirs, **bounds)
    if theirs.ndim and len(theirs) > 1:
        assert not np.allclose(ours[::-1], theirs, **bounds)

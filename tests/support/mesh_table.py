"""Functions on meshes: a call for each row of the table in docs/how-to/sharding.md.

A play takes caches, prompts and weights, and returns the cache and arrays that are the
same on any devices.
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
from support.small_attention_model import (
    DIM,
    KV_HEADS,
    LAYERS,
    attention_model,
    attention_params,
)
from support.tolerances import TOLERANCE

# The first repeats itself, so that it can be looked up, and is longer than the window.
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
    """Log-probabilities; no cache is given."""
    return jkv.score(
        attention_model, params, prompts, continuations, config=CONFIG, **where
    )


def differentiate(params, prompts, **where):
    """The derivative of scores by all weights."""

    def loss(params):
        return jnp.sum(jnp.sin(score(params, prompts, **where)))

    return jax.grad(loss)(params)


def extend(cache, prompts, params):
    """Two turns of two texts."""
    cache, opened = jkv.allocate(cache, [0, 0])
    found = []
    for texts in (prompts, prompts[:, :3]):
        cache, result = jkv.extend(
            attention_model,
            params,
            cache,
            opened.seq_ids,
            texts,
            max_new_tokens=4,
        )
        found += [result.tokens, result.logprobs]
    return jkv.free(cache, opened.seq_ids)[0], found


def beam_search(cache, prompts, params):
    """Two beams of each prompt."""
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
    """Continue both prompts at one time."""
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


def draft(caches, prompts, params):
    """With guesses of a draft model, which is the model itself."""
    cache, of_draft = caches
    speculate = DraftModel(
        model=attention_model, params=params, cache=of_draft, num_tokens=2
    )
    return generate(cache, prompts, params, speculate=speculate)


def look_up(cache, prompts, params):
    """With guesses that are looked up."""
    speculate = PromptLookup(num_tokens=2, min_ngram=1, cost=1.0)
    return generate(cache, prompts, params, speculate=speculate)


def generate_again(cache, prompts, params):
    """Behind a window that gives back; played twice, so that blocks are found."""
    return generate(cache, prompts, params, model=windowed_model)


def serve(cache, prompts, params):
    """By an engine."""
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
# Each rank is given its own arguments (`over_pools`): functions that take no pools.
BY_RANK = ("extend", "beam_search")


class Place(NamedTuple):
    """Where a row is played: on a mesh, or on one device."""

    where: dict[str, str]  # the mesh axes, by the sharded dimension

    @property
    def mesh(self):
        """Two devices for each axis."""
        names = tuple(self.where.values())
        devices = np.asarray(jax.devices()[: 2 ** len(names)])
        axis_types = (AxisType.Auto,) * len(names)
        return jax.sharding.Mesh(
            devices.reshape((2,) * len(names)), names, axis_types=axis_types
        )

    def init(self, config, **left_out):
        """A fresh cache."""
        if not self.where:
            return jkv.init(config)
        where = {n: axis for n, axis in self.where.items() if n not in left_out}
        return jkv.init(config, mesh=self.mesh, **where)

    def place_params(self):
        """The weights; projections by heads where these are on an axis."""
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
        """Return a row's results, on the host, and its cache; None where it has none.

        Args:
          row: of the table.
        """
        config = dataclasses.replace(CONFIG, **CHANGES.get(row, {}))
        function, params = PLAYS[row], self.place_params()
        if function in (score, differentiate):
            return None, self._play_without_cache(function, params)
        cache = self.init(config)
        if row == "debug":
            cache = jkv.debug(cache)
        if function is serve:
            return serve(cache, PROMPTS, params)
        if row in BY_RANK and cache.pools is not None:
            return self._play_on_ranks(function, cache, params)
        if function is draft:  # which is not donated: its cache is the caller's
            given = cache, self.init(config, pools=None)
            return jax.jit(function)(given, PROMPTS, params)
        run = jax.jit(function, donate_argnums=0)
        if function is generate_again:
            cache, _ = run(cache, PROMPTS, params)
        return run(cache, PROMPTS, params)

    def _play_without_cache(self, function, params):
        """Scores; with ranks each has the texts of its own."""
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
        """The second rank has the prompts in the other order."""

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
    # Values in few bits may be rounded the other way, as sums over heads are added up
    # in another order.
    dtype = CHANGES.get(row, {}).get("dtype")
    tolerance = 10 * TOLERANCE["bfloat16" if dtype else "float32"]
    leaves = jax.tree.leaves(found)
    for ours, theirs in zip(leaves, play_alone(row), strict=True):
        assert_alike(np.asarray(ours), theirs, tolerance)
    if cache is None:
        return
    if cache.pools is None:
        caches = [cache]
        assert (cache.sharding.heads, cache.sharding.context) == tuple(
            place.where.get(name) for name in ("heads", "context")
        )
    else:
        caches = jkv.split_pools(cache)
        assert all(jkv.stats(each).allocations > 0 for each in caches)
    for each in caches:
        jkv.check(each)
        assert int(jkv.num_free_blocks(each)) == CONFIG.num_blocks


def assert_alike(ours, theirs, tolerance):
    """Integers are equal and others close; some are not zero, and texts differ."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert theirs.any()
    if not np.issubdtype(theirs.dtype, np.floating):
        np.testing.assert_array_equal(ours, theirs)
        return
    bounds = dict(rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(ours, theirs, **bounds)
    if theirs.ndim and len(theirs) > 1:
        assert not np.allclose(ours[::-1], theirs, **bounds)

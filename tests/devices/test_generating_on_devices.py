"""Generation on a mesh: with one cache, and with a pool per rank."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support.compiled_hlo import ALL_PASSES
from support.jax_versions import IS_NEWEST, dealt
from support.models.sharded_model import (
    AUTO,
    WIDTH,
    collectives,
    make_weights,
    place_weights,
    run_model,
)

import jkv
from jkv.decoding.scheduler.data_parallel import deal
from jkv.decoding.sequences.prompts import Prompts

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8, 9, 7, 9], [1], [], [7, 7]]
NUM_ROWS, NUM_SEQUENCES = 5, len(PROMPTS)
CONFIG = dataclasses.replace(AUTO.config, num_blocks=40)
# Two ranks with a pool each: two pairs of devices share its heads, and each device of a
# pair has half of every block. (Before JAX 0.12 a mesh of Explicit axes is refused.)
LAYOUT = AUTO._replace(
    axes=(("dp", 2), ("tp", 2), ("cp", 2)),
    axis_type=AxisType.Explicit if IS_NEWEST else AxisType.Auto,
)


def generate(cache, weights):
    """Generate, with three sequences at a time on each rank."""
    return jkv.generate(
        run_model,
        weights,
        cache,
        PROMPTS,
        max_new_tokens=4,
        max_running=3,
        row_counts=(NUM_ROWS,),
        sampling=jkv.Sampling(
            temperature=np.float32(3), seeds=np.arange(NUM_SEQUENCES, dtype=np.int32)
        ),
    )


def init():
    return jkv.init(CONFIG, mesh=LAYOUT.mesh, heads="tp", context="cp", pools="dp")


def assert_as_on_one_device(result):
    """Assert tokens, reasons and logprobs of a cache without a mesh."""
    weights = jax.device_put(make_weights(8, 16))
    _, wanted = jax.jit(generate)(jkv.init(CONFIG), weights)
    for name in ("tokens", "lengths", "reasons"):
        np.testing.assert_array_equal(getattr(result, name), getattr(wanted, name))
    np.testing.assert_allclose(result.logprobs, wanted.logprobs, atol=1e-4)
    reasons = collections.Counter(np.asarray(result.reasons).tolist())
    assert reasons[jkv.FinishReason.EMPTY_PROMPT] == 1
    assert reasons[jkv.FinishReason.LENGTH] == NUM_SEQUENCES - 1


def on_spread_heads():
    """With sharded heads, each layer's collective is the only one in the loop."""
    arguments = jkv.init(CONFIG, mesh=AUTO.mesh, heads="tp"), place_weights(AUTO)
    compiled = jax.jit(generate, donate_argnums=0).lower(*arguments).compile(ALL_PASSES)
    cache, result = compiled(*arguments)
    assert collectives(compiled) == {("all-reduce", f"f32[{NUM_ROWS},{WIDTH}]"): 1}
    jkv.check(cache)
    assert int(jkv.num_free_blocks(cache)) == cache.num_blocks
    assert_as_on_one_device(result)


def on_two_pools():
    """Results are in prompt order; one collective before the loop, a few after it."""
    cache, weights = init(), place_weights(LAYOUT)
    before = cache.storage[0].key_pool.sharding
    # The first rank has blocks reserved for other sequences.
    cache, opened = jkv.over_pools(jkv.allocate)(cache, np.array([[4] * 2, [-1] * 2]))
    assert opened.seq_ids.tolist() == [[0, 1], [-1, -1]]
    compiled = (
        jax.jit(generate, donate_argnums=0).lower(cache, weights).compile(ALL_PASSES)
    )
    cache, result = compiled(cache, weights)
    assert_as_on_one_device(result)

    counts = collectives(compiled)
    assert counts.pop(("all-reduce", f"f32[{NUM_ROWS},{WIDTH}]")) == 1
    # Maxima, then totals and values, from which the parts of a sequence are joined.
    joined = [key for key in counts if f"f32[{NUM_ROWS},8" in key[1]]
    assert sum(map(counts.pop, joined)) == 2
    # The free blocks of the ranks, and the results of all sequences.
    assert counts.pop(("all-gather", "s32[2]")) == 1
    assert {name for name, _ in counts} == {"all-reduce"} and len(counts) <= 3
    assert all(f"[{NUM_SEQUENCES}" in kind or kind == "s32[]" for _, kind in counts)

    # Each rank has its own pool, sharded over four devices.
    pool = cache.storage[0].key_pool
    assert pool.sharding.is_equivalent_to(before, pool.ndim)
    assert {shard.data.nbytes for shard in pool.addressable_shards} == {
        pool.nbytes // 8
    }
    first, second = jkv.split_pools(cache)
    jkv.check(first)
    jkv.check(second)
    assert int(jkv.num_free_blocks(first)) == 38 and first.num_kv_heads == 8
    assert int(jkv.num_free_blocks(second)) == 40
    # Both ranks were used.
    used = [jkv.stats(pool).allocations for pool in (first, second)]
    assert used[0] > 2 and used[1] > 0


@pytest.mark.parametrize("play", dealt([on_spread_heads, on_two_pools]))
def test_generate_on_a_mesh_equals_one_device(play):
    play()


def follow_a_table(params, tokens, cache, _batch, *, all_rows=False):
    """A model with one successor per token, so that completions soon repeat."""
    following = (tokens * 3 + 1) % 8
    logits = params * jax.nn.one_hot(following, 16)  # prompts have tokens up to 9
    return (logits if all_rows else logits.at[_batch.last_rows].get(mode="clip")), cache


def generate_by_table(cache, scale, speculate):
    return jkv.generate(
        follow_a_table,
        scale,
        cache,
        PROMPTS,
        max_new_tokens=9,
        max_running=3,
        row_counts=(8,),
        speculate=speculate,
    )


def by_draft(config):
    return jkv.decoding.DraftModel(
        model=follow_a_table, params=np.float32(9), config=config
    )


def by_looking_up(_):
    return jkv.decoding.PromptLookup(cost=1.0)


@pytest.mark.one_end
@pytest.mark.further
@pytest.mark.parametrize("guess", [by_draft, by_looking_up])
def test_each_rank_drafts_for_its_own_sequences(guess):
    """Completions follow the table."""
    mesh = AUTO._replace(axes=(("dp", 2),)).mesh
    config = dataclasses.replace(CONFIG, max_context_length=64)
    wanted = np.full((NUM_SEQUENCES, 9), -1)
    for i, prompt in enumerate(PROMPTS):
        for place in range(9) if prompt else ():
            last = wanted[i, place - 1] if place else prompt[-1]
            wanted[i, place] = (last * 3 + 1) % 8
    speculate = guess(config)
    config = jkv.with_drafter(config, speculate)
    cache = jkv.init(config, storage=False, mesh=mesh, pools="dp")
    cache, result = jax.jit(generate_by_table)(cache, np.float32(9), speculate)
    np.testing.assert_array_equal(result.tokens, wanted)
    assert int(result.statistics.accepted_tokens) >= 10
    for pool in jkv.split_pools(cache):
        jkv.check(pool)
        assert int(jkv.num_free_blocks(pool)) == 40


@pytest.mark.one_end
def test_each_prompt_goes_to_the_rank_with_most_free_blocks():
    """Prompts need 3, 2, 3, 2, no and 2 blocks, with four new tokens."""
    prompts, _ = Prompts.of(PROMPTS).divide(4)
    free = jax.numpy.array([3, 9], np.int32)
    assert deal(prompts, free, 4, 1).tolist() == [1, 1, 1, 0, 0, 0]


@pytest.mark.one_end
def test_verbs_on_several_pools_suggest_over_pools():
    cache = init()
    with pytest.raises(ValueError, match=r"jkv.over_pools\(append\)"):
        jkv.append(cache, [0])
    with pytest.raises(ValueError, match=r"jkv.split_pools\(cache\)"):
        jkv.check(cache)
    alone = jkv.init(CONFIG)
    with pytest.raises(ValueError, match="with a pool for each rank"):
        jkv.over_pools(jkv.append)(alone, [[0]])
    with pytest.raises(ValueError, match="heads and pools must be different mesh axes"):
        jkv.init(CONFIG, mesh=LAYOUT.mesh, heads="tp", pools="tp")
    with pytest.raises(ValueError, match="pools='rank' must be an axis"):
        jkv.init(CONFIG, mesh=LAYOUT.mesh, pools="rank")
    explicit = LAYOUT._replace(axis_type=AxisType.Explicit).mesh
    with pytest.raises(ValueError, match="AxisType.Auto .* JAX 0.12"):
        jkv.init(CONFIG, mesh=explicit, heads="tp", pools="dp")
    axes = dict(heads="tp", context="cp", pools="dp")
    specs = jkv.partition_specs(CONFIG, mesh=LAYOUT.mesh, **axes)
    assert jax.tree.structure(specs) == jax.tree.structure(cache)
    assert tuple(specs.storage[0].key_pool) == ("dp", None, None, "tp", "cp")
    assert tuple(specs.metadata.sequences.rows) == ("dp",)

"""Tunix's rollout options, and the detection of equal prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models.tunix_models import EOS, options

import jkv
from jkv.integrations.tunix.pool import CallSizes, Pool
from jkv.integrations.tunix.prompts import find_repeats, find_width, pad_left, pad_right
from jkv.integrations.tunix.rollout import count_rows
from jkv.integrations.tunix.rollout_options import read_options


def read(**fields):
    return read_options(options(**fields), EOS)


@pytest.mark.parametrize(
    "fields",
    [
        dict(tensor_parallel_size=2),
        dict(expert_parallel_size=2),
        dict(rollout_vllm_kwargs={"seed": 1}),
        dict(rollout_sglang_jax_page_size=64),
        dict(rollout_vllm_max_num_seqs=8),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_options_of_other_engines_are_refused_by_name(fields):
    with pytest.raises(ValueError, match=f"RolloutConfig.{next(iter(fields))} is not"):
        read(**fields)


@pytest.mark.parametrize("fields", [dict(top_p=1.5), dict(temperature=-0.5)], ids=str)
def test_numbers_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields))} must be"):
        read(**(dict(top_p=1.0) | fields))


def test_step_rows_are_divisible_by_the_mesh():
    assert count_rows(running=6, chunk_size=512, multiple=1) == (6, 112, 512)
    assert count_rows(running=6, chunk_size=512, multiple=4) == (8, 112, 512)
    assert count_rows(running=6, chunk_size=2, multiple=4) == (8,)


def test_prompts_padded_on_either_side_widen_the_batch():
    sequences = [[5, 6, 7], [8]]
    assert find_width(sequences, 4) == 4 and find_width(sequences, 2) == 4
    assert pad_left(sequences, 4, 0).tolist() == [[0, 5, 6, 7], [0, 0, 0, 8]]
    assert pad_right(sequences, 4).tolist() == [[5, 6, 7, -1], [8, -1, -1, -1]]


def test_lengths_and_eos_tokens_are_read():
    request = read(max_tokens_to_generate=7, max_prompt_length=5, eos_tokens=[8, 9])
    assert (request.max_new_tokens, request.max_prompt_length) == (7, 5)
    assert request.stop_tokens == (8, 9)
    assert read(eos_tokens=None).stop_tokens == (EOS,)
    assert read(return_logprobs=False).wants_logprobs is False


def test_without_top_p_and_temperature_it_is_greedy():
    assert read(top_p=None, temperature=0.7).is_greedy
    assert read(top_p=0.9, temperature=0.0).is_greedy
    drawn = read(top_p=0.9, temperature=0.7, top_k=3)
    assert not drawn.is_greedy
    assert (drawn.temperature, drawn.top_p, drawn.top_k) == (0.7, 0.9, 3)


@pytest.mark.parametrize("top_k", [None, 0, -1])
def test_a_top_k_below_one_is_off(top_k):
    assert read(top_k=top_k, top_p=1.0).top_k == 0


def test_a_seed_is_a_number_or_either_kind_of_key():
    seeds = [5, np.int32(5), jnp.int32(5), jax.random.PRNGKey(5), jax.random.key(5)]
    keys = [jax.random.key_data(read(seed=seed).key).tolist() for seed in seeds]
    assert keys == [keys[0]] * len(seeds)
    of_nothing, of_zero = read(seed=None).key, read(seed=0).key
    zero = jax.random.key_data(of_zero).tolist()
    assert jax.random.key_data(of_nothing).tolist() == zero != keys[0]


def test_equal_prompts_are_found_in_any_rows():
    together = find_repeats([[5, 6]] * 4 + [[7]] * 4)
    assert together.first == [0, 4] and together.num_samples == 4
    mixed = find_repeats([[7], [5, 6], [7], [5, 6]])
    assert mixed.first == [0, 1] and mixed.prompts.tolist() == [0, 2, 1, 3]


def test_a_partial_micro_batch_uses_the_common_divisor():
    cut = find_repeats([[5]] * 8 + [[6]] * 4)
    assert cut.num_samples == 4 and cut.first == [0, 4, 8]
    assert sorted(cut.prompts.tolist()) == list(range(12))
    assert find_repeats([[5], [5], [6]]).num_samples == 1


def make_pool(num_blocks=None, prefix_caching=True):
    layers = dict(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
    one = dict(num_blocks=1, max_sequences=1, max_context_length=1)
    options = dict(block_size=4, prefix_caching=prefix_caching)
    return Pool(jkv.CacheConfig(**layers, **one, **options), num_blocks, None)


def test_the_pool_fits_all_running_sequences():
    pool = make_pool()
    # A prompt of 8 tokens has 2 shared blocks; 5 more tokens take 2 per sample.
    cache = pool.lend(CallSizes(8, 5, num_samples=4, max_running=8))
    assert cache.num_blocks == 3 * 2 + 9 * 2 and cache.max_sequences == 9
    pool.take_back(cache)
    assert pool.lend(CallSizes(8, 4, num_samples=4, max_running=8)) is cache
    pool.take_back(cache)
    longer = pool.lend(CallSizes(16, 5, num_samples=4, max_running=8))
    assert longer.max_context_length == 21


def test_a_pool_that_was_not_returned_is_recreated():
    pool, work = make_pool(), CallSizes(8, 5, num_samples=1, max_running=2)
    assert pool.lend(work) is not pool.lend(work)


def test_a_pool_without_prefix_caching_is_not_kept():
    pool = make_pool(prefix_caching=False)
    sizes = CallSizes(8, 5, num_samples=1, max_running=2)
    cache = pool.lend(sizes)
    pool.take_back(cache)
    assert pool.lend(sizes) is not cache


def test_a_pool_too_small_for_one_sequence_is_refused():
    with pytest.raises(ValueError, match="num_blocks must be >= 4 .* got 3"):
        make_pool(num_blocks=3).lend(CallSizes(8, 5, num_samples=1, max_running=2))

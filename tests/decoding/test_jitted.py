"""Tests of `jkv.jitted`: loops traced once, with a donated cache."""

import inspect

import numpy as np
import pytest
from support.models.small_attention_model import attention_model, attention_params
from support.small_caches import copied, small_config
from test_generation import fresh_cache

import jkv
from jkv import decoding, jitted

pytestmark = pytest.mark.one_end
PROMPTS = [[3, 4, 5], [6]]
ROWS = (8,)

# Traced arguments of a loop: arrays, or pytrees of arrays.
TRACED = {
    *("params", "cache", "state", "prompts", "tokens", "continuations", "seq_ids"),
    *("limits", "stop_tokens", "stop_sequences", "salts", "variants", "num_steps"),
    *("sampling", "speculate", "logits_processor", "processor_state", "length_penalty"),
    *("options", "spans"),
}


@pytest.mark.parametrize("name", jitted.__all__)
def test_every_argument_is_either_static_or_traced(name: str) -> None:
    signature = inspect.signature(getattr(decoding, name))
    assert inspect.signature(getattr(jitted, name)) == signature
    assert "fields" not in signature.parameters
    assert {
        *signature.parameters
    } <= jitted.STATIC | TRACED and not jitted.STATIC & TRACED
    assert {*jitted.READERS, *jitted.CHECKS} <= TRACED


def test_lists_and_arrays_are_one_program_and_the_cache_is_donated() -> None:
    traced = []

    def model(*args, **options):
        traced.append(1)
        return attention_model(*args, **options)

    def generate(cache, prompts, **options):
        return jitted.generate(
            model,
            attention_params(),
            cache,
            prompts,
            max_new_tokens=4,
            row_counts=[*ROWS],  # a list, which is not hashable
            sampling=jkv.Sampling(temperature=[0.0, 0.0]),
            **options,
        )

    given = copied(fresh_cache())
    cache, found = generate(given, PROMPTS, stop_tokens=[2], limits=(4, 3))
    assert given.storage[0].key_pool.is_deleted()
    first = len(traced)
    assert first
    padded = np.array([[7, 8, 9], [6, -1, -1]], np.int32)
    cache, again = generate(cache, padded, stop_tokens=[1], limits=[2, 2**40])
    _, _ = generate(cache, PROMPTS, stop_tokens=np.array([2]), limits=np.array([4, 3]))
    assert len(traced) == first
    assert not np.array_equal(found.tokens, again.tokens)
    expected = jkv.generate(
        attention_model,
        attention_params(),
        fresh_cache(),
        PROMPTS,
        max_new_tokens=4,
        row_counts=ROWS,
        stop_tokens=[2],
        limits=[4, 3],
    )[1]
    np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_decode_donates_cache_and_state() -> None:
    options = dict(max_new_tokens=4, row_counts=ROWS)
    params, cache = attention_params(), copied(fresh_cache())
    state = jitted.begin(attention_model, params, cache, PROMPTS, **options)
    assert not cache.storage[0].key_pool.is_deleted()
    lengths = state.result.lengths
    _, state = jitted.decode(attention_model, params, cache, state)
    assert cache.storage[0].key_pool.is_deleted() and lengths.is_deleted()
    assert state.result.lengths.tolist() == [4, 4]


def test_jitted_loops_refuse_invalid_arguments_like_the_loops() -> None:
    def generate(**options):
        return jitted.generate(
            attention_model,
            attention_params(),
            fresh_cache(),
            **{"prompts": PROMPTS, "max_new_tokens": 4} | options,
        )

    with pytest.raises(jkv.UsageError, match="prompts must be"):
        generate(prompts=[[1.5]])
    with pytest.raises(ValueError, match="stop_sequences must be"):
        generate(stop_sequences=[[1.5]])
    with pytest.raises(TypeError, match="max_tokens"):
        generate(max_tokens=3)


WRAPS = 2**32  # equal to 0 modulo 2**32


@pytest.mark.parametrize("make", [list, np.array], ids=["list", "numpy"])
@pytest.mark.parametrize("room", [jkv, jitted], ids=["plain", "jitted"])
class TestNumbersOf64Bits:
    """64-bit numbers are refused or clamped, never truncated to 32 bits."""

    def test_as_tokens(self, room, make) -> None:
        model, params = attention_model, attention_params()
        cache, large = fresh_cache(), make([[3, WRAPS + 5]])
        low = make([[3, 5 - WRAPS]])
        options = dict(max_new_tokens=2)
        for call in (
            lambda: room.generate(model, params, cache, large, **options),
            lambda: room.generate(model, params, cache, low, **options),
            lambda: room.extend(model, params, cache, [0], large, **options),
            lambda: room.score(model, params, large, [[4]], config=small_config()),
            lambda: room.score(model, params, [[4]], large, config=small_config()),
        ):
            with pytest.raises(ValueError, match="must fit in 32 bits, got"):
                call()

    def test_stop_conditions_out_of_range_are_refused(self, room, make) -> None:
        for options in (
            dict(stop_tokens=make([WRAPS + 7])),
            dict(stop_sequences=make([[3, WRAPS + 7]])),
        ):
            (name,) = options
            with pytest.raises(ValueError, match=f"{name} must fit in 32 bits, got"):
                room.generate(
                    attention_model,
                    attention_params(),
                    fresh_cache(),
                    PROMPTS,
                    max_new_tokens=2,
                    **options,
                )


def test_large_numbers_are_clamped() -> None:
    """Limits and sequence ids behave as in the functions without jit."""
    most = np.iinfo(np.int32).max
    for name in ("limits", "seq_ids", "variants", "num_steps"):
        for given in ([WRAPS + 1, -WRAPS], np.array([WRAPS + 1, -WRAPS])):
            read = jitted.READERS[name](name, given)
            assert read.dtype == np.int32 and read.tolist() == [most, -most - 1]
    salts = jitted.READERS["salts"]("salts", np.array([WRAPS - 1, -1]))
    assert salts.tolist() == [-1, -1]
    with pytest.raises(ValueError, match="salts must fit in 32 bits"):
        jitted.READERS["salts"]("salts", np.array([WRAPS]))

"""Engines of one size around the hash model, and random requests.

Only values vary: prompts, limits, stops, the blocks and rows that other sequences hold.
So the engines of all tests share three compiled programs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.decoding import FinishReason, Sampling, spread_seeds
from jkv.serving import Engine, StopSizes
from support.decoding.plain_queue import VOCABULARY, Call, PlainCompletions, hash_model
from support.grammar.automata import PlainAutomaton
from support.small_caches import copied, small_cache

WIDTH, NEW_TOKENS, SAMPLES, MOST_SAMPLES = 10, 12, 2, 3
CONTEXT, BLOCK_SIZE, BLOCKS, ROWS = 20, 4, 40, 10
RUNNING, AHEAD, STEPS = 4, 2, 3
ROW_COUNTS = (10,)  # one: each is a program to compile; test_queue covers several
STOPS = StopSizes(tokens=2, sequences=2, length=3)


def count_on(params, tokens, cache, batch):
    """A model whose next token is the token plus one, of 128 tokens."""
    del params
    return jax.nn.one_hot(tokens + 1, 128)[batch.last_rows], cache


@functools.cache
def pool(free_blocks=BLOCKS, free_rows=ROWS):
    """Create a pool full of NaN, in which other sequences hold the rest."""
    cache = small_cache(
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        max_sequences=ROWS + 12,
        max_context_length=CONTEXT,
        prefix_caching=True,
    )
    rows = ROWS + 12
    taken = np.clip(BLOCKS - free_blocks - 5 * np.arange(rows, dtype=np.int32), 0, 5)
    taken = np.where(np.arange(rows) < rows - free_rows, BLOCK_SIZE * taken, -1)
    cache, result = jkv.allocate(
        cache,
        taken.astype(np.int32),
        tokens=np.full((rows, WIDTH + NEW_TOKENS), -1, np.int32),
    )
    jkv.raise_for_status(result, cache)
    assert int(jkv.num_free_blocks(cache)) == free_blocks
    return cache


def make_engine(free_blocks=BLOCKS, free_rows=ROWS, nan_every=0, cache=None, **options):
    """Create an engine that checks the invariants after each window."""
    fields = dict(
        max_running=RUNNING,
        num_ahead=AHEAD,
        max_new_tokens=NEW_TOKENS,
        max_prompt_tokens=WIDTH,
        max_samples=SAMPLES,
        num_steps=STEPS,
        row_counts=ROW_COUNTS,
        stop_sizes=STOPS,
        checks=True,
    )
    cache = copied(pool(free_blocks, free_rows)) if cache is None else cache
    return Engine(hash_model, np.uint32(nan_every), cache, **(fields | options))


def draw_request(rng, **changes):
    """Draw arguments of `submit`; some prompts share a prefix."""
    starts = np.random.default_rng(0).integers(0, VOCABULARY, (3, WIDTH))
    length = rng.integers(1, WIDTH + 1)
    prompt = [*starts[rng.integers(3)][:8], *rng.integers(0, VOCABULARY, 2)][:length]
    n = changes.get("n", int(rng.integers(1, MOST_SAMPLES + 1)))
    sampling = Sampling(
        temperature=rng.choice([0.0, 0.7, 1.5], n).astype(np.float32),
        top_k=rng.choice([0, 3], n).astype(np.int32),
        top_p=float(rng.choice([1.0, 0.9])),
        repetition_penalty=rng.choice([1.0, 1.3], n).astype(np.float32),
        seeds=int(rng.integers(0, 1000)),
    )
    fields = dict(
        tokens=[int(token) for token in prompt],
        n=n,
        max_new_tokens=int(rng.integers(1, NEW_TOKENS + 1)),
        sampling=sampling,
        stop_tokens=rng.integers(0, VOCABULARY, rng.integers(0, 3)).tolist(),
        stop_sequences=[
            rng.integers(0, VOCABULARY, rng.integers(1, 4)).tolist()
            for _ in range(rng.integers(0, 3))
        ],
        salt=int(rng.integers(0, 2)),
        priority=int(rng.integers(-1, 2)),
    )
    return fields | changes


def expected(request, free_blocks=BLOCKS, nan_every=0, automata=None):
    """Return the completions of one request alone, in plain Python without a cache."""
    sampling, n = request["sampling"], request["n"]

    def spread(name, dtype):
        values = np.asarray(getattr(sampling, name))
        if name == "seeds" and values.ndim == 0:
            values = spread_seeds(values, n)
        values = np.broadcast_to(values, (n,)).astype(dtype)
        # Always the same number, so that sampling is compiled once.
        return jnp.asarray(np.resize(values, MOST_SAMPLES))

    call = Call(
        prompts=[list(request["tokens"])],
        limits=[request["max_new_tokens"]],
        num_samples=MOST_SAMPLES,
        max_new_tokens=NEW_TOKENS,
        stop_tokens=request["stop_tokens"],
        stop_sequences=request["stop_sequences"],
        sampling=Sampling(
            temperature=spread("temperature", np.float32),
            top_k=spread("top_k", np.int32),
            top_p=spread("top_p", np.float32),
            min_p=spread("min_p", np.float32),
            repetition_penalty=spread("repetition_penalty", np.float32),
            seeds=spread("seeds", np.int32),
        ),
        nan_every=nan_every,
        block_size=BLOCK_SIZE,
        max_context_length=CONTEXT,
        num_blocks=free_blocks,
    )
    plain = None
    if automata is not None:
        one = PlainAutomaton(automata, request["variant"], call.prompts[0])
        plain = [one] * MOST_SAMPLES
    alone = PlainCompletions(call, automata=plain)
    return alone.new[:n], alone.logprobs[:n], alone.reasons[:n]


def assert_alone(completions, request, **pool_of):
    """Assert that each sequence equals its solo run; a cancelled one up to its end."""
    tokens, logprobs, reasons = expected(request, **pool_of)
    assert len(completions) == request["n"]
    for i, found in enumerate(completions):
        count = len(found.tokens)
        if found.reason == FinishReason.CANCELLED:
            assert count < len(tokens[i]) or found.tokens == tokens[i]
        else:
            assert FinishReason(found.reason).name == reasons[i].name
            assert count == len(tokens[i])
        assert found.tokens == tokens[i][:count]
        np.testing.assert_allclose(
            found.logprobs, np.array(logprobs[i][:count]), atol=2e-6, rtol=0
        )


def assert_released(engine, free_blocks=BLOCKS, free_rows=ROWS):
    """Assert that blocks and rows are free again and other sequences unchanged."""
    before, after = pool(free_blocks, free_rows), engine.cache
    jkv.check(after)
    assert int(jkv.num_free_blocks(after)) == free_blocks
    np.testing.assert_array_equal(after.metadata.is_open, before.metadata.is_open)
    stats = engine.stats()
    assert stats.waiting == stats.running == stats.preempted == 0


def come_and_go(engine, rng, left):
    """Submit requests at random and cancel some until all have finished.

    Args:
        engine: an engine without requests.
        rng: the source of decisions.
        left: requests, taken from the end.

    Returns:
        The requests by number, the events, and the numbers of cancelled ones.
    """
    requests, events, cancelled = {}, [], set()
    while left or not engine.is_idle:
        for _ in range(rng.integers(0, 5)):
            if left:
                request = left.pop()
                requests[engine.submit(**request)] = request
        if requests and rng.random() < 0.2:
            number = int(rng.choice(list(requests)))
            if engine.cancel(number):
                cancelled.add(number)
        events += engine.step()
    return requests, events, cancelled


def run_all(engine):
    """Step until the engine is idle; return the events."""
    events = []
    while not engine.is_idle:
        events += engine.step()
    return events

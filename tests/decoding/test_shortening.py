"""Pressed prompts and rolling contexts in loops, compared with the verbs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models.small_attention_model import (
    LAYERS,
    VOCABULARY,
    attention_model,
    attention_params,
)

import jkv
from jkv import press
from jkv.decoding import FinishReason
from jkv.serving import Engine
from jkv.status import UsageError

pytestmark = pytest.mark.one_end
BUDGET, NUM_NEW = 9, 10
ROLL = jkv.Roll(first=3, step=8)
PROMPTS = [np.arange(2, 22) * 7 % VOCABULARY, np.arange(3, 9) * 5 % VOCABULARY]


def make_cache(num_blocks=64, **changes):
    fields = dict(
        num_layers=LAYERS,
        num_kv_heads=2,
        head_dim=4,
        num_blocks=num_blocks,
        block_size=4,
        max_sequences=6,
        max_context_length=32,
        dtype="float32",
        pruning=True,
    )
    return jkv.init(jkv.CacheConfig(**fields | changes))


def model(params, tokens, cache, batch, **options):
    """Attend with positions modulo 64, as those of rolled contexts exceed the table."""
    wrapped = dataclasses.replace(batch, positions=batch.positions % 64)
    return attention_model(params, tokens, cache, wrapped, **options)


@functools.cache
def jitted(num_rows):
    """Return a step of one sequence."""

    def step(params, cache, tokens, num_tokens):
        cache, batch = jkv.append(cache, [0], num_tokens[None], capacity=num_rows)
        return model(params, tokens, cache, batch)

    return jax.jit(step)


def compute(cache, tokens):
    """Compute tokens of sequence 0, and return the next one."""
    num_rows = 32 if len(tokens) > 1 else 1
    padded = np.pad(tokens, (0, num_rows - len(tokens)))
    count = jnp.int32(len(tokens))
    logits, cache = jitted(num_rows)(attention_params(), cache, padded, count)
    return cache, int(np.argmax(logits[0]))


def by_hand(prompt, num_new, rule=None, roll=None, **changes):
    """Return greedy tokens with a pressed prompt, or a rolling context."""
    cache, _ = jkv.allocate(make_cache(**changes), 0)
    cache, token = compute(cache, prompt)
    if rule is not None and len(prompt) > BUDGET:
        kept = []
        for layer in range(LAYERS):
            keys, values, length = jkv.read(cache, layer, 0)
            queries = jkv.read_queries(cache, layer, 0).queries if changes else None
            scores = rule.scores(keys[None], values[None], queries, length[None])
            kept.append(jkv.top_tokens(scores, BUDGET, length[None], BUDGET))
        cache, _ = jkv.prune(cache, 0, jnp.stack(kept, axis=1), BUDGET)
    found = [token]
    while len(found) < num_new:
        if roll and int(jkv.context_lengths(cache)[0]) == 32:
            kept = [*range(roll.first), *range(roll.first + roll.step, 32)]
            cache, _ = jkv.prune(cache, 0, [kept], len(kept))
        cache, token = compute(cache, [token])
        found.append(token)
    return found


def generate(cache, prompts, **fields):
    return jkv.generate(
        model, attention_params(), cache, prompts, chunk_size=8, **fields
    )


def test_pressed_prompts_keep_the_best_tokens():
    """Samples fork from the pressed prompt; preempted ones are pressed again."""
    rule = press.key_diff()
    expected = [by_hand(prompt, NUM_NEW, rule) for prompt in PROMPTS]
    fields = dict(max_new_tokens=NUM_NEW, press=rule, budget=BUDGET)
    cache, found = generate(make_cache(), PROMPTS, num_samples=2, **fields)
    assert found.tokens[::2].tolist() == found.tokens[1::2].tolist() == expected
    assert int(jkv.num_free_blocks(cache)) == 64
    jkv.check(cache)
    _, found = generate(make_cache(num_blocks=8), PROMPTS, **fields)
    assert found.tokens.tolist() == expected
    assert found.statistics.preemptions > 0


@pytest.mark.further
def test_pressed_prompts_are_indexed_before_compression():
    """Another call hits the prompt's blocks, and presses the same prompt again."""
    rule = press.knorm()
    expected = [by_hand(PROMPTS[0], NUM_NEW, rule)]
    fields = dict(max_new_tokens=NUM_NEW, press=rule, budget=BUDGET)
    cache = make_cache(prefix_caching=True)
    for num_cached in (0, 19):
        cache, found = generate(cache, PROMPTS[:1], **fields)
        assert found.tokens.tolist() == expected
        assert int(found.statistics.cached_tokens) in (num_cached, num_cached - 3)
        jkv.check(cache)


@pytest.mark.further
@pytest.mark.parametrize(
    "rule",
    [press.snap_kv(4, 3), press.expected_attention(8, 2, rotate=lambda rows, _: rows)],
    ids=["snap_kv", "expected_attention"],
)
def test_rules_get_the_observed_queries(rule):
    """Also after a prefix cache hit, which leaves the observed tokens to compute."""
    fields = dict(observed_queries=4, num_query_heads=4)
    expected = [by_hand(prompt, NUM_NEW, rule, **fields) for prompt in PROMPTS]
    options = dict(max_new_tokens=NUM_NEW, press=rule, budget=BUDGET)
    cache = make_cache(prefix_caching=True, **fields)
    for num_cached in (0, 20 - 4 + 6 - 4):
        cache, found = generate(cache, PROMPTS, **options)
        assert found.tokens.tolist() == expected
        assert int(found.statistics.cached_tokens) == num_cached
        jkv.check(cache)
    _, found = generate(make_cache(num_blocks=8, **fields), PROMPTS, **options)
    assert found.tokens.tolist() == expected
    assert found.statistics.preemptions > 0
    other = by_hand(PROMPTS[0], NUM_NEW, press.knorm())
    assert other != expected[0]


def test_a_context_rolls_several_times():
    """A prompt longer than the context rolls, too; preempted sequences roll again."""
    expected = [by_hand(prompt, 60, roll=ROLL) for prompt in PROMPTS]
    cache, found = generate(make_cache(), PROMPTS, max_new_tokens=60, roll=ROLL)
    assert found.tokens.tolist() == expected
    assert set(found.reasons.tolist()) == {jkv.FinishReason.LENGTH}
    few = make_cache(num_blocks=12)
    _, found = generate(few, PROMPTS, max_new_tokens=60, roll=ROLL)
    assert found.tokens.tolist() == expected
    assert found.statistics.preemptions > 0


@pytest.mark.further
def test_a_conversation_rolls():
    """`extend` continues after dropped tokens, and rolls at the longest context."""
    expected = by_hand(PROMPTS[0], 50, roll=ROLL)
    cache, opened = jkv.allocate(make_cache(), [0])
    given = [int(token) for token in PROMPTS[0]]
    tokens = []
    for num_new in (24, 10, 16):
        cache, found = jkv.extend(
            model,
            attention_params(),
            cache,
            opened.seq_ids,
            [given],
            max_new_tokens=num_new,
            roll=ROLL,
        )
        tokens += found.tokens[0].tolist()
        given = tokens[-1:]
    assert tokens == expected
    assert int(jkv.next_positions(cache)[0]) == len(PROMPTS[0]) + 49


@pytest.mark.further
def test_an_engine_rolls():
    expected = by_hand(PROMPTS[0], 40, roll=ROLL)
    engine = Engine(
        model,
        attention_params(),
        make_cache(),
        max_running=2,
        max_new_tokens=40,
        max_prompt_tokens=40,
        roll=ROLL,
        checks=True,
    )
    (found,) = engine.generate([PROMPTS[0]])
    assert found.tokens == expected
    # The whole sequence is a valid prompt, although it exceeds the context.
    sequence = [*map(int, PROMPTS[0]), *expected[:19]]
    (again,) = engine.generate([sequence], max_new_tokens=21)
    assert again.tokens == expected[19:]
    engine.close()


class Chat:
    """A rolling conversation computed token by token, without parking."""

    def __init__(self):
        self.cache, _ = jkv.allocate(make_cache(), 0)
        self.tokens, self.num_computed = [], 0

    def answer(self, tokens, num_new):
        """Append tokens, and return the following ones."""
        self.tokens += map(int, tokens)
        first = len(self.tokens)
        while len(self.tokens) < first + num_new:
            if int(jkv.context_lengths(self.cache)[0]) == 32:
                kept = [*range(ROLL.first), *range(ROLL.first + ROLL.step, 32)]
                self.cache, _ = jkv.prune(self.cache, 0, [kept], len(kept))
            newest = self.tokens[self.num_computed]
            self.cache, token = compute(self.cache, [newest])
            self.num_computed += 1
            if self.num_computed == len(self.tokens):
                self.tokens.append(token)
        return self.tokens[first:]


def make_engine(num_blocks=64, **options):
    cache = make_cache(num_blocks, prefix_caching=True, max_sequences=4)
    sizes = dict(max_running=2, max_new_tokens=40, max_prompt_tokens=160) | options
    return Engine(model, attention_params(), cache, **sizes, roll=ROLL, checks=True)


def run(engine):
    while not engine.is_idle:
        engine.step()


@pytest.mark.further
@pytest.mark.parametrize("max_bytes", [None, 100], ids=["host", "recomputed"])
def test_a_parked_rolled_sequence_is_swapped_out(max_bytes):
    """It runs over several contexts; without host memory it is recomputed."""
    engine, chat = make_engine(max_parked_bytes=max_bytes), Chat()
    number, given = engine.submit(PROMPTS[0]), PROMPTS[0]
    for tool, num_new in ([4, 4], 40), ([7, 1, 3], 40), ([], 8):
        engine.park(number)
        run(engine)
        assert engine.results(number)[0].tokens == chat.answer(given, 40)
        assert engine.stats().parked == 1
        assert (engine.stats().parked_bytes > 0) == (max_bytes is None)
        assert int(jkv.num_free_blocks(engine.cache)) == 64
        before, given = engine.stats().prompt_tokens, tool
        number = engine.resume(number, given, max_new_tokens=num_new)
    (found,) = engine.results(number)
    assert found.tokens == chat.answer([], 8)
    num_computed = engine.stats().prompt_tokens - before
    # Only the newest token; otherwise all tokens after the first rolled block.
    assert num_computed == 1 if max_bytes is None else num_computed > 100
    engine.close()
    assert int(jkv.num_free_blocks(engine.cache)) == 64
    jkv.check(engine.cache)


@pytest.mark.further
def test_a_cancelled_rolled_sequence_leaves_no_row_to_the_next():
    """A parked request with the index of a cancelled one computes its own row."""
    engine = make_engine(max_running=1, num_ahead=0)
    first = engine.submit(PROMPTS[0])
    while len(engine.results(first, wait=False)[0].tokens) < 25:
        engine.step()
    engine.cancel(first)
    second = engine.submit(PROMPTS[1])
    engine.park(second)
    for _ in range(20):
        engine.step()
    (found,) = engine.results(second, wait=False)
    assert found.tokens == Chat().answer(PROMPTS[1], 40)
    assert int(jkv.num_free_blocks(engine.cache)) == 64


@pytest.mark.further
@pytest.mark.parametrize("num_read", [20, 40], ids=["running", "finished"])
def test_new_weights_drop_a_rolled_sequence(num_read):
    """Also if it has finished with unread tokens."""
    engine = make_engine()
    number = engine.submit(PROMPTS[0])
    engine.park(number)
    while engine.stats().generated_tokens + 8 < num_read:
        engine.step()
    engine.update_params(attention_params())
    has_ended = engine.results(number, wait=False)[0].reason != FinishReason.RUNNING
    assert has_ended == (num_read == 40)
    run(engine)
    stats = engine.stats()
    assert (stats.parked, stats.parked_bytes) == (1, 0)
    assert int(jkv.num_free_blocks(engine.cache)) == 64


@pytest.mark.further
def test_randomly_parked_chats_continue():
    """The pool preempts; some chats are cancelled, and some kept rows are evicted."""
    rng, engine, swaps = np.random.default_rng(0), make_engine(10), []
    chats, numbers, given = [None] * 3, [None] * 3, [None] * 3
    for _ in range(24):
        i = int(rng.integers(3))
        if chats[i] is None:
            chats[i], given[i] = Chat(), [i, *PROMPTS[1]]
            numbers[i] = engine.submit(given[i], max_new_tokens=25)
            engine.park(numbers[i])
            continue
        for _ in range(rng.integers(6)):
            engine.step()
        if rng.random() < 0.2:
            engine.cancel(numbers[i])
        (found,) = engine.results(numbers[i])
        assert found.tokens == chats[i].answer(given[i], len(found.tokens))
        given[i] = rng.integers(2, VOCABULARY, rng.integers(3)).tolist()
        if len(chats[i].tokens) > 130:
            chats[i] = None
            continue
        swaps.append(engine.stats().parked_bytes > 0)
        numbers[i] = engine.resume(numbers[i], given[i], max_new_tokens=25)
        if rng.random() < 0.2:  # parked after it has finished, so it is recomputed
            engine.results(numbers[i])
        engine.park(numbers[i])
    assert {*swaps} == {False, True} and engine.stats().preemptions > 0
    engine.close()
    assert int(jkv.num_free_blocks(engine.cache)) == 10


def test_dropped_tokens_are_counted():
    assert [ROLL.count_dropped(n, 32) for n in (5, 32, 33, 40, 41)] == [0, 0, 8, 8, 16]


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(press=press.knorm()), "press and budget"),
        (dict(budget=3), "press and budget"),
        (dict(press=3, budget=3), "method scores"),
        (dict(press=press.knorm(), budget=0), "budget"),
        (dict(roll=3), "jkv.Roll"),
        (dict(roll=jkv.Roll(0, 6)), "multiple of the block size"),
        (dict(roll=jkv.Roll(30, 8)), "lower step"),
        (dict(roll=ROLL, num_samples=2), "num_samples"),
        (dict(roll=ROLL, press=press.knorm(), budget=3), "exclude each other"),
        (dict(press=press.knorm(), budget=3, exact=(2, 4)), "exact"),
        (dict(roll=ROLL, speculate=jkv.PromptLookup()), "speculate"),
        (dict(press=press.snap_kv(), budget=3), "snap_kv needs queries"),
    ],
)
def test_wrong_options_are_refused_by_name(fields, message):
    with pytest.raises((UsageError, ValueError), match=message):
        jkv.generate(
            model, attention_params(), make_cache(), [[1]], max_new_tokens=2, **fields
        )


@pytest.mark.parametrize(
    "fields", [dict(roll=ROLL), dict(press=press.knorm(), budget=3)]
)
def test_a_cache_without_pruning_is_refused(fields):
    cache = make_cache(pruning=False)
    with pytest.raises(UsageError, match="pruning=True"):
        generate(cache, [[1]], max_new_tokens=2, **fields)

"""generate with pressed prompts and rolling contexts, beside the verbs by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_attention_model import (
    LAYERS,
    VOCABULARY,
    attention_model,
    attention_params,
)

import jkv
from jkv import press
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
    """Its table of positions has 64 rows: positions of rolled contexts repeat."""
    wrapped = dataclasses.replace(batch, positions=batch.positions % 64)
    return attention_model(params, tokens, cache, wrapped, **options)


@functools.cache
def jitted(num_rows):
    """A step of one sequence."""

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


def by_hand(prompt, num_new, rule=None, roll=None):
    """Greedy tokens with a pressed prompt, or a rolling context."""
    cache, _ = jkv.allocate(make_cache(), 0)
    cache, token = compute(cache, prompt)
    if rule is not None and len(prompt) > BUDGET:
        kept = []
        for layer in range(LAYERS):
            keys, values, length = jkv.read(cache, layer, 0)
            scores = rule.scores(keys[None], values[None], None, length[None])
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


def test_pressed_prompts_are_cached_whole():
    """Another call finds the prompt's blocks, and presses the same prompt again."""
    rule = press.knorm()
    expected = [by_hand(PROMPTS[0], NUM_NEW, rule)]
    fields = dict(max_new_tokens=NUM_NEW, press=rule, budget=BUDGET)
    cache = make_cache(prefix_caching=True)
    for num_cached in (0, 19):
        cache, found = generate(cache, PROMPTS[:1], **fields)
        assert found.tokens.tolist() == expected
        assert int(found.statistics.cached_tokens) in (num_cached, num_cached - 3)
        jkv.check(cache)


def test_a_rolling_context_goes_on():
    """A prompt longer than the context rolls too; preempted sequences roll again."""
    expected = [by_hand(prompt, 60, roll=ROLL) for prompt in PROMPTS]
    cache, found = generate(make_cache(), PROMPTS, max_new_tokens=60, roll=ROLL)
    assert found.tokens.tolist() == expected
    assert set(found.reasons.tolist()) == {jkv.FinishReason.LENGTH}
    few = make_cache(num_blocks=12)
    _, found = generate(few, PROMPTS, max_new_tokens=60, roll=ROLL)
    assert found.tokens.tolist() == expected
    assert found.statistics.preemptions > 0


def test_a_conversation_rolls():
    """extend continues behind dropped tokens, and rolls at the longest context."""
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
    # The whole text is a prompt, too, although it is longer than the context.
    text = [*map(int, PROMPTS[0]), *expected[:19]]
    (again,) = engine.generate([text], max_new_tokens=21)
    assert again.tokens == expected[19:]
    engine.close()


def test_dropped_tokens_are_counted():
    assert [ROLL.count_dropped(n, 32) for n in (5, 32, 33, 40, 41)] == [0, 0, 8, 8, 16]


@pytest.mark.parametrize(
    "fields, says",
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
def test_wrong_options_are_refused_by_name(fields, says):
    with pytest.raises((UsageError, ValueError), match=says):
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

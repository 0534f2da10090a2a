"""A chain of logits processors in the loop, compared with plain Python.

The model is that of `test_generation`, in the shapes of `test_processors`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoding.plain_processors import (
    PlainProcessor,
    banned_sequences,
    early_ends,
    find_forced,
    repeated_ngrams,
    spent_budgets,
)
from test_generation import (
    VOCABULARY,
    assert_as_before,
    attention_model,
    attention_params,
    completions,
    fresh_cache,
    padded,
    per_row,
    reasons,
)
from test_processors import (
    LOOKUP,
    NEW_TOKENS,
    PROMPTS,
    ROW_COUNTS,
    RUNNING,
    SAMPLES,
    generate,
    play_alone,
    random_prompts,
)

import jkv
from jkv.logits_processors import (
    BannedSequences,
    MinimumLength,
    NoRepeatedNgrams,
    ThinkingBudget,
    TokenBias,
    chain,
)

pytestmark = pytest.mark.one_end
LEAST, BUDGETS, OPENING, CLOSING = [0, 6, 12], [0, 2, 5], [4], [7, 5, 7, 6]
# The last variant bans a tag that is forced.
BANNED = [[[9], [3, 3]], [[8, 6, 3]], [[10], [5, 7, 6]]]
LAST = 12
BIAS = {2: 3.0, 4: 3.0, 11: -4.0}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class EndsWith(jkv.LogitsProcessor):
    """Ends a sequence after a token that the loop has no stop condition for."""

    token: jax.Array  # i32[]

    def begin(self, variants, prompts):
        del prompts
        return jnp.zeros(variants.shape, bool)

    def process(self, state, logits):
        del state
        return logits

    def advance(self, state, tokens):
        return jnp.where(tokens < 0, state, tokens == self.token)

    def ended(self, state):
        return state


def make_chain():
    banned = np.full((3, 2, 3), -1, np.int32)
    for variant, lists in enumerate(BANNED):
        for row, tokens in zip(banned[variant], lists, strict=False):
            row[: len(tokens)] = tokens
    return chain(
        TokenBias(np.int32([*BIAS]), np.float32([*BIAS.values()])),
        NoRepeatedNgrams(4, NEW_TOKENS),
        BannedSequences(banned),
        MinimumLength(np.int32([2]), np.int32(LEAST)),
        EndsWith(np.int32(LAST)),
        ThinkingBudget(np.int32(OPENING), np.int32(CLOSING), np.int32(BUDGETS)),
    )


def make_rules(variant):
    """Return the rules of one variant in plain Python."""
    if variant < 0:
        return []
    return [
        repeated_ngrams(4),
        banned_sequences(BANNED[variant]),
        early_ends([2], LEAST[variant]),
        spent_budgets(OPENING, CLOSING, BUDGETS[variant]),
    ]


def run_alone(prompts, limits, sampling, variants):
    """Complete each prompt alone, with the rules of its variant."""
    variants = np.repeat(variants, SAMPLES)
    bias = np.zeros(VOCABULARY, np.float32)
    bias[[*BIAS]] = [*BIAS.values()]
    biases = np.where(variants[:, None] >= 0, bias, 0)
    plain = [
        PlainProcessor(
            make_rules(variant),
            prompts[i // SAMPLES],
            VOCABULARY,
            [LAST] if variant >= 0 else [],
        )
        for i, variant in enumerate(variants)
    ]
    return play_alone(prompts, limits, sampling, plain, biases)


@pytest.mark.further
def test_chained_processors_equal_plain_python():
    """Batching, samples, preemption, prompt lookup, forced and banned tags."""
    rng = np.random.default_rng(10)
    links, seen, preemptions, accepted, tags = make_chain(), set(), 0, 0, 0
    num_last = num_clashes = 0
    for game in range(6):
        prompts, variants = random_prompts(rng), rng.integers(-1, 3, PROMPTS)
        temperature = np.float32(rng.choice([0.0, 1.0], PROMPTS * SAMPLES))
        sampling = per_row(PROMPTS * SAMPLES, temperature=temperature)
        limits = rng.integers(8, NEW_TOKENS + 1, PROMPTS)
        alone = run_alone(prompts, limits, sampling, variants)
        cache = fresh_cache([64, 9, 8][game % 3], 8)
        after, result = generate(
            attention_model,
            attention_params(),
            cache,
            padded(prompts, PROMPTS),
            max_new_tokens=NEW_TOKENS,
            limits=np.int32(limits),
            stop_tokens=np.int32([2]),
            sampling=sampling,
            num_samples=SAMPLES,
            max_running=RUNNING,
            row_counts=ROW_COUNTS,
            speculate=LOOKUP,
            logits_processor=links,
            variants=np.int32(variants),
        )
        assert_as_before(after, cache)
        assert completions(result) == alone.new
        assert reasons(result) == [reason.name for reason in alone.reasons]
        for found, new in zip(result.logprobs, alone.logprobs, strict=True):
            np.testing.assert_allclose(found[: len(new)], new, atol=2e-5)
        seen |= {*reasons(result)}
        preemptions += int(result.statistics.preemptions)
        accepted += int(result.statistics.accepted_tokens)
        num_last += sum(
            completion[-1:] == [LAST] and reason == "STOP"
            for completion, reason in zip(
                completions(result), reasons(result), strict=True
            )
        )
        for row, completion in enumerate(completions(result)):
            variant, prompt = int(variants[row // SAMPLES]), prompts[row // SAMPLES]
            if reasons(result)[row] == "NOTHING_ALLOWED" and variant >= 0:
                tag = OPENING, CLOSING, BUDGETS[variant]
                forced = find_forced(prompt + completion, *tag)
                banned = banned_sequences(BANNED[variant])
                num_clashes += forced in banned(prompt, completion, range(VOCABULARY))
        written = [" ".join(map(str, completion)) for completion in completions(result)]
        tags += sum(
            completion.count(" ".join(map(str, CLOSING))) for completion in written
        )
    assert {"STOP", "LENGTH", "NOTHING_ALLOWED"} <= seen
    assert preemptions > 2 and accepted > 10 and tags > 5 and num_last > 2
    # A token that one processor forces and another masks is a rejected draft token.
    assert num_clashes > 2

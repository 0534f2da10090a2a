"""Logits processors, each compared with plain Python on random sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoding import plain_processors
from support.decoding.plain_processors import PlainProcessor

import jkv
from jkv.logits_processors import (
    AllowedTokens,
    BannedSequences,
    MinimumLength,
    NoRepeatedNgrams,
    ThinkingBudget,
    TokenBias,
    chain,
    renumber,
)

pytestmark = pytest.mark.one_end
SEQUENCES, MOST, NEW, VOCABULARY = 48, 8, 10, 6
BANS = [[[1, 2], [3], [2, 2, 4]], [[0, 1, 0], [5, 5], [4, 4]]]
TAGS = [([1], [2]), ([1, 2], [2, 2, 3]), ([0, 1], [1, 0]), ([1], [2, 1])]


@jax.jit
def begin(logits_processor, variants, prompts):
    return logits_processor.begin(variants, prompts)


@jax.jit
def process(logits_processor, state, logits):
    return logits_processor.process(state, logits), logits_processor.forced(state)


@jax.jit
def advance(logits_processor, state, tokens):
    return logits_processor.advance(state, tokens)


def padded(lists, width):
    return np.int32([row + [-1] * (width - len(row)) for row in lists])


def play(processor, plain_of, seed=0):
    """Compare the allowed tokens after each new token of random sequences.

    Args:
        processor: a `LogitsProcessor`.
        plain_of: from a variant and a prompt to a `PlainProcessor`.
        seed: of the sequences.

    Returns:
        The share of masked tokens, and the forced tokens of each step with their
        sequences: (prompt, new, token).
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, MOST + 1, SEQUENCES)
    prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]
    variants = rng.integers(0, processor.num_variants, SEQUENCES).astype(np.int32)
    plain = [plain_of(v, prompt) for v, prompt in zip(variants, prompts, strict=True)]
    new = [[] for _ in prompts]
    state = begin(processor, variants, padded(prompts, MOST))
    logits = rng.standard_normal((SEQUENCES, VOCABULARY)).astype(np.float32)
    shares, reported = [], []
    for _ in range(NEW):
        # Rows in any order.
        order = rng.permutation(SEQUENCES)
        rows = jax.tree.map(lambda array, order=order: array[order], state)
        processed_logits, forced = process(processor, rows, logits)
        allowed = np.array([plain[i].allowed(new[i]) for i in order])
        np.testing.assert_array_equal(
            processed_logits, np.where(allowed, logits, -np.inf)
        )
        shares.append(1 - allowed.mean())
        if forced is not None:
            reported += [
                (prompts[i], list(new[i]), int(token))
                for i, token in zip(order, forced, strict=True)
            ]
        # Some sequences get no token.
        tokens = rng.integers(-1, VOCABULARY, SEQUENCES).astype(np.int32)
        before = jax.tree.map(jnp.copy, state)
        state = advance(processor, state, tokens)
        jax.tree.map(
            lambda old, now, tokens=tokens: np.testing.assert_array_equal(
                old[tokens < 0], now[tokens < 0]
            ),
            before,
            state,
        )
        for sequence, token in zip(new, tokens.tolist(), strict=True):
            sequence += [token] if token >= 0 else []
    return np.mean(shares), reported


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_ngram_is_repeated(size):
    rule = plain_processors.repeated_ngrams(size)
    share, _ = play(
        NoRepeatedNgrams(size, max_new_tokens=NEW),
        lambda _, prompt: PlainProcessor([rule], prompt, VOCABULARY),
    )
    assert share > 0.02


def test_ngrams_past_the_length_limit_drop_the_oldest_tokens():
    pairs = NoRepeatedNgrams(2, max_new_tokens=1)
    state = pairs.begin(np.int32([0]), np.int32([[1, 2, 3]]))
    for token in (2, 1):
        state = pairs.advance(state, np.int32([token]))
    # The first token of 1 2 3 2 1 is dropped, and so is its bigram.
    assert np.isfinite(pairs.process(state, np.zeros((1, 5), np.float32))).all()
    state = pairs.advance(state, np.int32([3]))
    assert pairs.process(state, np.zeros((1, 5), np.float32))[0, 2] == -np.inf


def test_no_completion_ends_before_its_minimum_length():
    ends, least = [2, 4], [0, 3, 7]
    share, _ = play(
        MinimumLength(np.array([2, -1, 4]), np.array(least)),
        lambda variant, prompt: PlainProcessor(
            [plain_processors.early_ends(ends, least[variant])], prompt, VOCABULARY
        ),
    )
    assert share > 0.05
    one = MinimumLength(np.int32([2]), 3)
    play(
        one,
        lambda _, prompt: PlainProcessor(
            [plain_processors.early_ends([2], 3)], prompt, VOCABULARY
        ),
    )


def test_end_tokens_of_each_variant():
    ends = [[2, -1], [0, 4]]
    for given, least in ((np.int32([3, 6]), [3, 6]), (4, [4, 4])):

        def plain_of(variant, prompt, least=least):
            rule = plain_processors.early_ends(ends[variant], least[variant])
            return PlainProcessor([rule], prompt, VOCABULARY)

        share, _ = play(MinimumLength(np.int32(ends), given), plain_of)
        assert share > 0.05


def test_only_allowed_tokens_are_left():
    allowed = [[0, 5, 2], [4], []]

    def plain_of(variant, prompt):
        rule = plain_processors.other_tokens(allowed[variant])
        return PlainProcessor([rule], prompt, VOCABULARY)

    play(AllowedTokens(padded(allowed, 4)), plain_of)
    play(AllowedTokens(np.int32([0, -1, 5, 2, 2, 99])), plain_of)


def test_variants_of_a_chain_are_independent():
    """A sequence has a different variant, or none, in each processor of a chain."""
    least, allowed = [2, 5], [[0, 5, 2], [4, 2, 1]]
    of_lengths, of_tokens = [1, -1, 0, 0], [-1, -1, 1, 0]

    def plain_of(variant, prompt):
        rules = []
        if of_lengths[variant] >= 0:
            ends = plain_processors.early_ends([2], least[of_lengths[variant]])
            tags = plain_processors.spent_budgets([1], [2, 4], 2)
            rules += [ends, tags]
        if of_tokens[variant] >= 0:
            rules += [plain_processors.other_tokens(allowed[of_tokens[variant]])]
        return PlainProcessor(rules, prompt, VOCABULARY)

    inner = chain(
        MinimumLength(np.int32([2]), np.int32(least)),
        ThinkingBudget(np.int32([1]), np.int32([2, 4]), 2),
    )
    tokens = AllowedTokens(np.int32(allowed))
    links = chain(
        renumber(inner, np.int32(of_lengths)), renumber(tokens, np.int32(of_tokens))
    )
    assert links.num_variants == 4 and links.num_end_tokens == 0
    share, reported = play(links, plain_of)
    assert 0.2 < share < 0.8 and {token for *_, token in reported} == {-1, 2, 4}
    # A sequence without a variant reads no row.
    state = links.begin(np.int32([-1]), np.int32([[1, 1, 1]]))
    assert np.isfinite(links.process(state, np.zeros((1, 6), np.float32))).all()
    assert links.forced(state).tolist() == [-1]


def test_renumbered_processors_end_only_their_sequences():
    ends = Says(np.int32([3, 3]), np.array([True, True]))
    state = (one := renumber(ends, np.int32([-1, 0]))).begin(np.arange(2), None)
    assert one.ended(state).tolist() == [False, True] and one.num_end_tokens == 1
    assert one.forced(state).tolist() == [-1, 3]
    silent = renumber(Says(None, None), np.int32([0]))
    state = silent.begin(np.int32([0]), None)
    assert silent.ended(state) is None and silent.forced(state) is None


@pytest.mark.parametrize("numbers", [[0, 2], [-2], [[0]], [0.5]])
def test_invalid_variants_are_refused(numbers):
    two = MinimumLength(np.int32([1]), np.int32([2, 3]))
    with pytest.raises(ValueError, match="renumber: "):
        renumber(two, np.array(numbers))


def test_banned_sequences_are_never_completed():
    sequences = np.stack([padded(banned, 3) for banned in BANS])
    share, _ = play(
        BannedSequences(sequences),
        lambda variant, prompt: PlainProcessor(
            [plain_processors.banned_sequences(BANS[variant])], prompt, VOCABULARY
        ),
    )
    assert share > 0.05
    # Banned single tokens, and an empty list.
    play(
        BannedSequences(np.int32([[5], [-1], [0]])),
        lambda _, prompt: PlainProcessor(
            [plain_processors.banned_sequences([[5], [0]])], prompt, VOCABULARY
        ),
    )


@pytest.mark.parametrize("opening, closing", TAGS)
def test_thinking_is_closed_when_its_budget_is_spent(opening, closing):
    budgets = [0, 2, 4]
    found = {}

    def plain_of(variant, prompt):
        found[tuple(prompt)] = budgets[variant]
        rule = plain_processors.spent_budgets(opening, closing, budgets[variant])
        return PlainProcessor([rule], prompt, VOCABULARY)

    tags = np.int32(opening), np.int32(closing)
    _, reported = play(ThinkingBudget(*tags, np.int32(budgets)), plain_of)
    assert len({token for *_, token in reported}) == 1 + len({*closing})


def test_thinking_has_its_budget_and_the_closing_tag():
    """A model that never stops thinking; the tag is forced from its first token on."""
    brief = ThinkingBudget(np.int32([7]), np.int32([8, 8, 9]), 3)
    for thought, rest in (
        ([1, 1, 1], [8, 8, 9]),
        ([1, 8, 8], [9]),
        ([8, 1, 8], [8, 9]),
    ):
        state = brief.begin(np.int32([0]), np.int32([[5, 7, -1]]))
        for token in thought:
            assert int(brief.forced(state)[0]) == -1
            state = brief.advance(state, np.int32([token]))
        for token in rest:
            assert int(brief.forced(state)[0]) == token
            state = brief.advance(state, np.int32([token]))
        assert int(brief.forced(state)[0]) == -1
        assert not state.is_thinking[0]


def test_biases_are_added():
    tokens = np.array([[1, 3, 3, -1], [0, -1, -1, 5]])
    values = np.float32([[0.5, -100, 1, 9], [-np.inf, 7, 8, 2]])
    bias = TokenBias(tokens, values)
    logits = np.ones((3, VOCABULARY), np.float32)
    state = bias.begin(np.int32([0, 1, 0]), np.int32([[1], [2], [3]]))
    found = bias.process(bias.advance(state, np.int32([4, -1, 0])), logits)
    first, second = [1, 1.5, 1, -98, 1, 1], [-np.inf, 1, 1, 1, 1, 3]
    np.testing.assert_array_equal(found, [first, second, first])
    alike = TokenBias(tokens[0], values[0])
    state = alike.begin(np.int32([0, 0, 0]), np.int32([[1], [2], [3]]))
    np.testing.assert_array_equal(alike.process(state, logits), [first] * 3)


def test_a_chain_masks_the_union_of_its_links():
    least, closing = [1, 6], [2, 4]
    links = chain(
        NoRepeatedNgrams(3, max_new_tokens=NEW),
        MinimumLength(np.int32([2]), np.int32(least)),
        chain(
            BannedSequences(padded(BANS[0], 3)), TokenBias(np.int32([0]), np.zeros(1))
        ),
        ThinkingBudget(np.int32([1]), np.int32(closing), np.int32([2, 3])),
    )
    assert links.num_variants == 2 and links.num_end_tokens == 0
    _, reported = play(
        links,
        lambda variant, prompt: PlainProcessor(
            [
                plain_processors.repeated_ngrams(3),
                plain_processors.early_ends([2], least[variant]),
                plain_processors.banned_sequences(BANS[0]),
                plain_processors.spent_budgets([1], closing, [2, 3][variant]),
            ],
            prompt,
            VOCABULARY,
        ),
    )
    assert {token for *_, token in reported} == {-1, *closing}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Says(jkv.LogitsProcessor):
    """Forces a token and ends a sequence, as its fields state."""

    token: jax.Array | None
    has_ended: jax.Array | None

    def begin(self, variants, prompts):
        del prompts
        return variants

    def process(self, state, logits):
        return logits + state[:, None].astype(jnp.float32)

    def advance(self, state, tokens):
        del tokens
        return state

    def ended(self, state):
        del state
        return self.has_ended

    def forced(self, state):
        del state
        return self.token


def test_a_chain_combines_forced_tokens_and_ends():
    silent = Says(None, None)
    assert chain(silent).forced((0,)) is None and chain(silent).ended((0,)) is None
    tokens = np.int32([-1, 3, -1, 3, 3]), np.int32([-1, -1, 4, 4, 3])
    ends = [np.array([True, False, True]), np.array([False, False, True])]
    both = chain(Says(tokens[0], ends[0]), silent, Says(tokens[1], ends[1]))
    assert both.forced((0, 0, 0)).tolist() == [-1, 3, 4, -1, 3]
    assert both.ended((0, 0, 0)).tolist() == [True, False, True]
    assert both.num_end_tokens == 3


def test_conflicting_forced_and_masked_tokens_end_the_sequence():
    links = chain(
        ThinkingBudget(np.int32([4]), np.int32([7, 5]), 1),
        BannedSequences(np.int32([[7, 5]])),
    )
    state = links.begin(np.int32([0]), np.int32([[4, 3, 7]]))
    assert links.forced(state).tolist() == [5]
    assert jnp.max(links.process(state, jnp.zeros((1, 10)))) == -jnp.inf


def test_a_processor_with_one_variant_applies_to_all_sequences():
    links = chain(Says(None, None), MinimumLength(np.int32([1]), np.int32([0, 1, 2])))
    variants, _ = links.begin(np.int32([2, -1, 0]), np.int32([[1], [1], [1]]))
    assert variants.tolist() == [0, -1, 0]


def test_invalid_chains_are_refused():
    with pytest.raises(ValueError, match="at least one jkv.LogitsProcessor"):
        chain()
    for wrong in (3, TokenBias):
        with pytest.raises(ValueError, match="methods begin, process"):
            chain(wrong)
    two, three = (MinimumLength(np.int32([1]), np.arange(n)) for n in (2, 3))
    with pytest.raises(ValueError, match=r"or one, got \[2, 3\]"):
        chain(two, three)
    assert chain(two, MinimumLength(np.int32([1]), 4), two).num_variants == 2


@pytest.mark.parametrize(
    "wrong, message",
    [
        (NoRepeatedNgrams(0, 8), "size must be an int >= 1, got 0"),
        (NoRepeatedNgrams(2, 1.5), "max_new_tokens must be an int >= 1, got 1.5"),
        (
            MinimumLength(np.int32(2), 3),
            r"end_tokens must be .*got int32\[\]",
        ),
        (MinimumLength(np.int32([2]), 0.5), "min_new_tokens must be int32.*got float"),
        (
            MinimumLength(np.int32([[2], [3]]), np.int32([1, 2, 3])),
            "number of variants, got 2 and 3",
        ),
        (AllowedTokens(np.int32(2)), r"tokens must be int32.A. or .*got int32\[\]"),
        (
            BannedSequences(np.int32([2])),
            r"sequences must be int32.F, C. or .*got int32\[1\]",
        ),
        (
            ThinkingBudget(np.int32([1]), np.int32([]), 3),
            "at least one token, got 1 and 0",
        ),
        (
            ThinkingBudget(np.int32([[1]]), np.int32([2]), 3),
            "open_tag must be int32.A., got",
        ),
        (
            TokenBias(np.int32([1, 2]), np.float32([1])),
            r"float32\[2\], shaped as tokens, got float32\[1\]",
        ),
        (TokenBias(np.float32([1]), np.float32([1])), "tokens must be int32.E. or"),
    ],
)
def test_wrong_fields_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong.begin(np.int32([0]), np.int32([[1, 2, -1]]))


def test_processors_are_pytrees_of_dynamic_fields():
    """Static fields belong to the structure, so that programs differ by them."""
    structures = {
        jax.tree.structure(NoRepeatedNgrams(size, most))
        for size, most in ((2, 8), (3, 8), (2, 9))
    }
    assert len(structures) == 3

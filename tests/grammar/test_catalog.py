"""Grammar catalogs: each grammar masks the same tokens as alone, in any place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.grammar import (
    Catalog,
    CatalogFull,
    TooLarge,
    Vocabulary,
    from_choices,
    from_regex,
    join,
)

pytestmark = pytest.mark.one_end

TOKENS = [bytes([97 + i]) for i in range(6)] + [b"ab", b"cd", b"abc", None]
VOCABULARY = Vocabulary(TOKENS, end_tokens=[9])
PATTERNS = ["(ab)+", "a{1,5}b?", "[a-f]*c", "abc|cd", "(a|bc){2,4}", "e"]


@jax.jit
def look(grammar, state):
    """Return a sequence's allowed tokens, forced token, and whether it has ended."""
    allowed = grammar.process(state, jnp.zeros((1, len(TOKENS)))) == 0
    return allowed[0], grammar.forced(state)[0], grammar.ended(state)[0]


begin = jax.jit(lambda grammar, *given: grammar.begin(*given))
advance = jax.jit(lambda grammar, *given: grammar.advance(*given))


def walk(grammar, variant, rng, length=8):
    """Return the masks of a random sequence at each step, and its tokens."""
    state = begin(grammar, np.int32([variant]), np.zeros((1, 1), np.int32))
    answers, tokens = [], []
    for _ in range(length):
        allowed, forced, ended = jax.device_get(look(grammar, state))
        answers.append((allowed.tolist(), int(forced), bool(ended)))
        choices = allowed.nonzero()[0]
        # Sometimes a masked token.
        if not len(choices) or rng.random() < 0.05:
            choices = np.arange(len(TOKENS))
        tokens.append(int(rng.choice(choices)))
        state = advance(grammar, state, np.int32(tokens[-1:]))
    return answers, tokens


def test_catalog_changes_preserve_other_grammars():
    rng = np.random.default_rng(0)
    grammars = [from_regex(pattern, VOCABULARY) for pattern in PATTERNS]
    catalog = Catalog(
        VOCABULARY, max_grammars=3, max_states=24, max_transitions=120, max_masks=20
    )
    here, full = {}, 0
    for turn in range(40):
        if here and (rng.random() < 0.4 or len(here) == 3):
            variant = int(rng.choice(list(here)))
            catalog.remove(variant)
            del here[variant]
        else:
            number = int(rng.integers(len(grammars)))
            try:
                here[catalog.add(grammars[number])] = number
            except CatalogFull:
                full += 1
        whole = catalog.grammar
        assert whole.num_variants == 3
        for variant in range(3):
            seed = int(rng.integers(1000))
            found = walk(whole, variant, np.random.default_rng(seed))
            if variant not in here:
                assert not any(found[0][0][0])  # all tokens are masked
                continue
            alone = grammars[here[variant]]
            assert found == walk(alone, 0, np.random.default_rng(seed)), turn
    assert full > 1


def test_grammars_too_large_for_a_catalog_are_refused():
    small = Catalog(VOCABULARY, max_grammars=1, max_states=3)
    with pytest.raises(TooLarge, match="exceeds the catalog"):
        small.add(from_regex("a{5}", VOCABULARY))
    one = from_choices(["a", "b"], VOCABULARY)
    small.add(one)
    with pytest.raises(CatalogFull, match="does not fit beside 1 others"):
        small.add(one)
    with pytest.raises(ValueError, match="must be of one language"):
        small.add(join([one, one]))
    other = Vocabulary(TOKENS[:-2] + [None], end_tokens=[8])
    with pytest.raises(ValueError, match="of the catalog's vocabulary"):
        small.add(from_choices(["a"], other))
    with pytest.raises(KeyError):
        small.remove(2)

"""Constrained samples of the bundled model at a high temperature match their grammars.

llguidance accepts every token, so each completion is a valid prefix. Python parses
completions with an end token.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from support.grammar.llguidance_masks import Matcher, make_tokenizer, of_schema
from support.paths import EXAMPLES

import jkv
from jkv.decoding import PromptLookup
from jkv.grammar import (
    from_choices,
    from_json_schema,
    from_regex,
    join,
    vocabulary_of,
    with_one_spelling,
)

pytestmark = pytest.mark.one_end

BUNDLED = EXAMPLES / "models" / "pydoc"
SCHEMAS = [
    {
        "type": "object",
        "properties": {"is_class": {"type": "boolean"}, "of": {"enum": ["io", "os"]}},
        "required": ["is_class", "of"],
    },
    {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
]
# Characters of two, three and four bytes; a token may be part of one.
PATTERNS = [r"[A-Z][a-z]{2,8}( [a-z]+){0,3}\.", "(é|日本|😀)+!", "(yes|no, never)"]
MOST, RUNNING = 24, 64


def check_texts(result, prompts_of, languages, vocabulary):
    """Check all completions; return the number that ended with an end token."""
    tokenizer, num_tokens = make_tokenizer(vocabulary), len(vocabulary.tokens)
    ended = 0
    for row, length, reason, language in zip(
        *(np.asarray(each) for each in result[:3]), prompts_of, strict=True
    ):
        grammar, read = languages[language]
        tokens = row[:length].tolist()
        matcher = Matcher(tokenizer, grammar, num_tokens)
        for token in tokens:
            assert token in matcher.allowed()
            matcher.advance(token)
        if reason == jkv.FinishReason.STOP:
            ended += 1
            assert tokens[-1] in vocabulary.end_tokens
            text = b"".join(vocabulary.tokens[token] for token in tokens[:-1]).decode()
            assert read(text), text
        else:
            assert reason == jkv.FinishReason.LENGTH
    return ended


def read_object(text):
    value = json.loads(text)
    assert value.keys() == {"is_class", "of"} and isinstance(value["is_class"], bool)
    return value["of"] in ("io", "os")


def read_integers(text):
    values = json.loads(text)
    return len(values) <= 4 and all(type(value) is int for value in values)


@pytest.mark.further
@pytest.mark.parametrize(
    "num_rounds",
    [pytest.param(1, id="few"), pytest.param(12, marks=pytest.mark.further, id="many")],
)
def test_high_temperature_samples_match_their_grammars(num_rounds):
    """About 3,600 completions; some rounds use speculation and one spelling."""
    model, params = pretrained.load(BUNDLED, jnp.float32, scan_layers=True)
    tokenizer = pretrained.load_tokenizer(BUNDLED)
    vocabulary = vocabulary_of(tokenizer, tuple(model.config.stop_tokens))
    grammars = [from_json_schema(schema, vocabulary) for schema in SCHEMAS]
    grammars += [from_regex(pattern, vocabulary) for pattern in PATTERNS[:2]]
    grammars += [from_choices(["yes", "no, never"], vocabulary)]
    joined = join(grammars)
    joined = joined if num_rounds == 1 else with_one_spelling(joined, vocabulary)
    languages = [
        (of_schema(SCHEMAS[0]), read_object),
        (of_schema(SCHEMAS[1]), read_integers),
        *(
            (
                f"start: /{pattern}/",
                lambda text, pattern=pattern: re.fullmatch(pattern, text),
            )
            for pattern in PATTERNS
        ),
    ]
    rounds_of = 300 if num_rounds > 1 else 10
    prompt = tokenizer.encode("The with statement").ids
    cache = jkv.init(
        jkv.CacheConfig.for_context_length(
            len(prompt) + MOST + 1,
            max_sequences=RUNNING,
            dtype=jnp.float32,
            **model.cache_fields,
        )
    )
    static = ("model", "max_new_tokens", "max_running", "row_counts")
    generate = jax.jit(jkv.generate, static_argnames=static, donate_argnames="cache")
    ended = count = 0
    for number in range(num_rounds):
        variants = np.arange(rounds_of, dtype=np.int32) % len(languages)
        cache, result = generate(
            model,
            params,
            cache,
            np.tile(np.int32(prompt), (rounds_of, 1)),
            max_new_tokens=MOST,
            max_running=min(RUNNING, rounds_of),
            row_counts=(RUNNING,),
            sampling=jkv.Sampling(temperature=1.5, seeds=1000 * number),
            logits_processor=joined,
            variants=variants,
            speculate=PromptLookup(num_tokens=3) if num_rounds > 1 else None,
        )
        ended += check_texts(result, variants.tolist(), languages, vocabulary)
        count += rounds_of
    assert 0.3 * count < ended < count

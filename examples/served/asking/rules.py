"""Per-request token rules: biases, penalties, bans and minimum length."""

from collections.abc import Mapping
from typing import Any

from ..loading import Served
from ..mistakes import Refused
from ..processors.rule_table import (
    MOST_ALLOWED,
    MOST_BAD_WORDS,
    MOST_BIASES,
    MOST_TOKENS_OF_A_WORD,
    Rules,
)
from ..values import is_tokens, read_number

# Each field with its neutral value.
FIELDS = {"logit_bias": {}, "min_tokens": 0, "bad_words": [], "allowed_token_ids": None}
FIELDS |= {"presence_penalty": 0, "frequency_penalty": 0}


def read_rules(
    served: Served,
    body: Mapping[str, Any],
    *,
    stop_tokens: list[int],
    max_new_tokens: int,
    has_language: bool,
) -> Rules | None:
    """Return the rules of a body, or None.

    Args:
        served: the model.
        body: the fields.
        stop_tokens: stop tokens of the request.
        max_new_tokens: limit of the request.
        has_language: whether decoding is constrained; then the model's own stop tokens
            end completions too.

    Raises:
        Refused: for invalid rules, or if the server has rules disabled.
    """
    given = [
        name
        for name, nothing in FIELDS.items()
        if body.get(name) is not None and body[name] != nothing
    ]
    if not given:
        return None
    if not served.has_rules:
        raise Refused(
            f"{given[0]} is not enabled: start the server with --rules",
            given[0],
            code="unsupported_parameter",
        )
    ends = sorted({*stop_tokens, *(served.stop_tokens if has_language else ())})
    return Rules(
        _read_biases(served, body.get("logit_bias")),
        read_number(body, "min_tokens", 0, int, 0, max_new_tokens),
        ends,
        _read_bad_words(served, body.get("bad_words")),
        _read_allowed(served, body.get("allowed_token_ids")),
        read_number(body, "presence_penalty", 0.0, float, -2, 2),
        read_number(body, "frequency_penalty", 0.0, float, -2, 2),
    )


def _read_biases(served: Served, given: Any) -> dict[int, float]:
    name = "logit_bias"
    given = {} if given is None else given
    if not isinstance(given, Mapping) or len(given) > MOST_BIASES:
        raise Refused(
            f"{name} must be an object of at most {MOST_BIASES} token ids", name
        )
    found = {}
    for key, value in given.items():
        is_id = key.isascii() and key.isdigit() and len(key) < 10
        if not is_id or int(key) >= served.vocabulary_size:
            raise Refused(f"{name}: {key[:60]!r} is not a token id", name)
        value = read_number({name: value}, name, 0.0, float, -100, 100)
        found[int(key)] = value
    return found


def _read_bad_words(served: Served, given: Any) -> list[list[int]]:
    """Return the token ids of each word, at a line's start and after a space."""
    name = "bad_words"
    given = [] if given is None else given
    is_texts = isinstance(given, list) and all(isinstance(w, str) for w in given)
    if not is_texts or len(given) > MOST_BAD_WORDS or not all(map(str.strip, given)):
        raise Refused(
            f"{name} must be a list of at most {MOST_BAD_WORDS} strings, each with "
            f"more than spaces in it",
            name,
        )
    if sum(map(len, given)) > served.most_characters:
        raise Refused(
            f"{name} has {sum(map(len, given))} characters in all, above the limit of "
            f"{served.most_characters}",
            name,
        )
    spelled = [text for word in given for text in (word, " " + word.lstrip())]
    encoded = served.tokenizer.encode_batch(spelled, add_special_tokens=False)
    found = [encoding.ids for encoding in encoded if encoding.ids]
    if any(len(tokens) > MOST_TOKENS_OF_A_WORD for tokens in found):
        raise Refused(
            f"{name}: a string has {max(map(len, found))} tokens, "
            f"above the limit of {MOST_TOKENS_OF_A_WORD}",
            name,
        )
    return found


def _read_allowed(served: Served, given: Any) -> list[int] | None:
    name = "allowed_token_ids"
    if given is None:
        return None
    if not is_tokens(given) or len(given) > MOST_ALLOWED:
        raise Refused(f"{name} must be a list of 1 to {MOST_ALLOWED} token ids", name)
    wrong = [token for token in given if not 0 <= token < served.vocabulary_size]
    if wrong:
        raise Refused(f"{name}: {str(wrong[0])[:60]} is not a token id", name)
    return given

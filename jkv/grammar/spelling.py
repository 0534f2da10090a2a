"""Force one tokenization where a language determines the next bytes.

A key of a JSON schema can be tokenized in many ways, and a grammar allows them all.
With one spelling it allows only the longest certain token, so that runs of tokens are
forced and speculative decoding verifies them in one step. The language is unchanged;
only its tokenization is. (SGLang's jump-forward decoding computes it on the host:
https://lmsys.org/blog/2024-02-05-compressed-fsm/.)
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jkv.arguments import explains_arguments
from jkv.grammar.grammar import PIECE, Grammar
from jkv.grammar.vocabulary import Vocabulary

# States with more allowed tokens are skipped: their next bytes are not determined.
_MOST_TOKENS = 256


@explains_arguments
def with_one_spelling(grammar: Grammar, vocabulary: Vocabulary) -> Grammar:
    """Return a grammar of the same language with determined text tokenized one way.

    A token is certain in a state if every string of the language continues with its
    bytes; only the longest certain token stays allowed. Each adds one mask.

    Args:
      grammar: of one language, or a join.
      vocabulary: the one that it was compiled for. Without a token for every single
        byte fewer states change, so that no string is lost.

    Raises:
      ValueError: for another vocabulary.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.grammar import Vocabulary, from_choices, with_one_spelling
      >>> tokens = [b"y", b"yes", b"no", b"e", b"s", None]
      >>> vocabulary = Vocabulary(tokens, end_tokens=[5])
      >>> grammar = from_choices(["yes", "no"], vocabulary)
      >>> grammar = with_one_spelling(grammar, vocabulary)
      >>> state = grammar.advance(jnp.int32([0]), jnp.int32([0]))
      >>> grammar.forced(state).tolist()
      [3]
    """
    if len(vocabulary.tokens) != grammar.vocabulary_size:
        raise ValueError(
            f"vocabulary must have the grammar's {grammar.vocabulary_size} tokens, got "
            f"{len(vocabulary.tokens)}; pass the one that it was compiled for"
        )
    states = _States(grammar, vocabulary)
    found = {
        state: token
        for state in range(grammar.num_states)
        if (token := states.find_certain(state)) is not None
    }
    if not found:
        return grammar
    rows = {token: i for i, token in enumerate(sorted(set(found.values())))}
    mask_of_state = np.array(grammar.mask_of_state)
    forced = np.array(grammar.forced_token)
    for state, token in found.items():
        mask_of_state[state] = grammar.masks.shape[0] + rows[token]
        forced[state] = token
    pieces, masks = _add_masks(grammar, list(rows))
    return dataclasses.replace(
        grammar,
        mask_pieces=jax.device_put(pieces),
        masks=jax.device_put(masks),
        mask_of_state=jax.device_put(mask_of_state),
        forced_token=jax.device_put(forced),
    )


def _add_masks(grammar: Grammar, tokens: list[int]) -> tuple[Any, Any]:
    """Return the mask pieces and masks with a one-token mask for each token."""
    old = np.asarray(grammar.mask_pieces)
    nothing, first = len(old), len(old) + 1
    new = np.zeros((1 + len(tokens), PIECE), np.uint32)
    masks = np.full((len(tokens), grammar.masks.shape[1]), nothing, np.int32)
    for row, token in enumerate(tokens):
        word, bit = divmod(token, 32)
        new[1 + row, word % PIECE] = np.uint32(1 << bit)
        masks[row, word // PIECE] = first + row
    pieces = np.concatenate([old, new])
    dtype = np.min_scalar_type(len(pieces) - 1)
    dtype = np.dtype(np.int32) if dtype.itemsize > 2 else dtype
    joined = np.concatenate([np.asarray(grammar.masks).astype(np.int32), masks])
    return pieces, joined.astype(dtype)


class _States:
    """A grammar's states on the host."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        self._tokens, self._ends = vocabulary.tokens, set(vocabulary.end_tokens)
        singles = {token for token in vocabulary.tokens if token and len(token) == 1}
        self._has_all_bytes = len(singles) == 256
        self._arrays: dict[str, Any] = {
            field.name: np.asarray(getattr(grammar, field.name))
            for field in dataclasses.fields(grammar)
        }
        self._allowed: dict[int, dict[int, bytes] | None] = {}  # by row of `masks`
        self._agreeing: dict[tuple[int, bytes], bool] = {}

    def find_certain(self, state: int) -> int | None:
        """Return the longest certain token; None without a choice or certain token."""
        allowed = self._find_allowed(state)
        if allowed is None or len(allowed) < 2:
            return None
        token, longest = max(allowed.items(), key=lambda one: (len(one[1]), -one[0]))
        for other, spelled in allowed.items():
            if not longest.startswith(spelled):
                return None
            rest = longest[len(spelled) :]
            if not self._goes_on_with(self._follow(state, other), rest):
                return None
        return token

    def _goes_on_with(self, state: int, rest: bytes) -> bool:
        """Return True if every continuation starts with `rest`, in any tokenization."""
        if not rest:
            return True
        if (state, rest) not in self._agreeing:
            allowed = self._find_allowed(state)
            self._agreeing[state, rest] = bool(allowed) and all(
                self._goes_on_with(self._follow(state, token), rest[len(spelled) :])
                if rest.startswith(spelled)
                else self._has_all_bytes and spelled.startswith(rest)
                for token, spelled in (allowed or {}).items()
            )
        return self._agreeing[state, rest]

    def _find_allowed(self, state: int) -> dict[int, bytes] | None:
        """Return the allowed tokens; None if there are many, or an end token is one."""
        number = int(self._arrays["mask_of_state"][state])
        if number not in self._allowed:
            words = self._arrays["mask_pieces"][self._arrays["masks"][number]].reshape(
                -1
            )
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            tokens = np.flatnonzero(bits).tolist()
            found = None
            if len(tokens) <= _MOST_TOKENS and not self._ends & {*tokens}:
                found = {token: self._tokens[token] or b"" for token in tokens}
            self._allowed[number] = found
        return self._allowed[number]

    def _follow(self, state: int, token: int) -> int:
        arrays = self._arrays
        column = arrays["class_of_token"][arrays["variant_of_state"][state], token]
        piece, lane = divmod(int(column), PIECE)
        row = arrays["transitions"][int(arrays["row_of_state"][state]) + piece]
        return int(arrays["transition_pieces"][row, lane])

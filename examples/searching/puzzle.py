"""The puzzle: a sentence that ends in a given column, of likely tokens.

The full stop must stand in a given column, and every token must be one of the model's
most likely next tokens. The model generates from left to right and does not know about
columns. Dead ends show only at the end of the line, where greedy decoding gets stuck.

Symbols: `B` lines, `V` tokens in the vocabulary, `A` next tokens per line, `W` maximum
tokens per line.
"""

import string
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LETTERS = frozenset(string.ascii_letters)
IN_SENTENCES = LETTERS | frozenset(" ,-'")


class Line(NamedTuple):
    """Partial lines."""

    tokens: jax.Array  # i32[B, W], padded with -1
    num_tokens: jax.Array  # i32[B]
    columns: jax.Array  # i32[B], length in characters
    logprobs: jax.Array  # f32[B], sums over tokens
    is_over: jax.Array  # bool[B], True if no token can follow


class Choices(NamedTuple):
    """Candidates for the next token of each line."""

    tokens: jax.Array  # i32[B, A], most likely first
    logprobs: jax.Array  # f32[B, A], -inf for illegal tokens

    @classmethod
    def none(cls, *shape: int) -> "Choices":
        """Return candidates that are all illegal."""
        return cls(jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf))

    @property
    def best(self) -> tuple[jax.Array, jax.Array]:
        """The most likely legal token, i32[B], and its log-probability, f32[B]."""
        column = jnp.argmax(self.logprobs, axis=1)[:, None]
        tokens = jnp.take_along_axis(self.tokens, column, axis=1)[:, 0]
        return tokens, self.logprobs.max(axis=1)

    @property
    def are_none(self) -> jax.Array:
        """True for lines without a legal token, bool[B]."""
        return ~jnp.isfinite(self.logprobs).any(axis=1)


class Puzzle(NamedTuple):
    """Target columns of the lines, and data about the tokens."""

    widths: jax.Array  # i32[B], columns of the full stops
    sizes: jax.Array  # i32[V], characters per token
    is_allowed: jax.Array  # bool[V], True if legal in a sentence
    is_word_end: jax.Array  # bool[V], True if a full stop may follow
    full_stop: jax.Array  # i32[], token id

    def begin(self, max_tokens: int) -> Line:
        """Return empty lines of at most `max_tokens`."""
        none = jnp.zeros_like(self.widths)
        tokens = jnp.full((none.shape[0], max_tokens), -1, jnp.int32)
        return Line(tokens, none, none, none.astype(jnp.float32), none > 0)

    def choose(self, logits: jax.Array, line: Line, num_choices: int) -> Choices:
        """Return the top candidates of each line, from logits, f32[B, V]."""
        likely = jnp.where(self.is_allowed, jax.nn.log_softmax(logits), -jnp.inf)
        logprobs, tokens = jax.lax.top_k(likely, num_choices)
        place = jnp.maximum(line.num_tokens - 1, 0)[:, None]
        last = jnp.take_along_axis(line.tokens, place, axis=1)
        columns = line.columns[:, None] + self.sizes[tokens]
        # An empty line has no last token.
        may_stop = self.is_word_end.at[last].get(
            mode="fill", fill_value=False, wrap_negative_indices=False
        )
        fits = jnp.where(
            tokens == self.full_stop,
            (columns == self.widths[:, None]) & may_stop,
            columns < self.widths[:, None],
        )
        return Choices(tokens, jnp.where(fits, logprobs, -jnp.inf))

    def advance(self, line: Line, tokens: jax.Array, logprobs: jax.Array) -> Line:
        """Append a token to each unfinished line.

        Args:
          line: the lines.
          tokens: i32[B].
          logprobs: f32[B]; -inf marks an illegal token, which finishes the line.
        """
        max_tokens = line.tokens.shape[1]
        writes = ~line.is_over & jnp.isfinite(logprobs)
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        place = jnp.where(writes, line.num_tokens, max_tokens)
        num_tokens = line.num_tokens + writes.astype(jnp.int32)
        is_over = ~writes | (tokens == self.full_stop) | (num_tokens == max_tokens)
        return Line(
            line.tokens.at[rows, place].set(tokens, mode="drop"),
            num_tokens,
            line.columns + jnp.where(writes, self.sizes[tokens], 0),
            line.logprobs + jnp.where(writes, logprobs, 0.0),
            is_over,
        )

    def judge(self, line: Line) -> jax.Array:
        """Return the values of finished lines, f32[B].

        The value is the geometric mean of the token probabilities if the full stop is
        in its column, else 0.
        """
        count = jnp.maximum(line.num_tokens, 1).astype(jnp.float32)
        return jnp.where(
            line.columns == self.widths, jnp.exp(line.logprobs / count), 0.0
        )


def read_vocabulary(tokenizer: Any, size: int) -> dict[str, np.ndarray]:
    """Return the token fields of a `Puzzle`.

    A sentence consists of letters, spaces, commas, hyphens and apostrophes. A full stop
    may follow two letters, which excludes "e.g.".
    """
    # Decode after a letter, since some tokenizers strip leading spaces.
    letter = tokenizer.encode("a", add_special_tokens=False).ids
    start = len(tokenizer.decode(letter))
    texts = [tokenizer.decode([*letter, token])[start:] for token in range(size)]
    if "." not in texts:
        raise ValueError("the tokenizer has no token for a full stop alone")
    is_word_end = [len(t) > 1 and LETTERS.issuperset(t[-2:]) for t in texts]
    full_stop = texts.index(".")
    allowed = [bool(text) and IN_SENTENCES.issuperset(text) for text in texts]
    allowed[full_stop] = True
    return {
        "sizes": np.array([len(text) for text in texts], np.int32),
        "is_allowed": np.array(allowed),
        "is_word_end": np.array(is_word_end),
        "full_stop": np.array(full_stop, np.int32),
    }

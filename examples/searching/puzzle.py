"""The puzzle: a sentence that fills its line, with words that a model finds likely.

The full stop must stand in a given column, and every token must be one of the few that
the model finds likeliest behind the text so far. A model writes from left to right,
with no knowledge of columns. Only the end of the line shows if words that end there can
follow, and greedy text is stuck there.

Symbols: `B` lines, `V` tokens in the vocabulary, `A` tokens that may follow, `W` most
tokens of a line.
"""

import string
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LETTERS = frozenset(string.ascii_letters)
IN_SENTENCES = LETTERS | frozenset(" ,-'")


class Line(NamedTuple):
    """The written part of each line."""

    tokens: jax.Array  # i32[B, W], -1 behind the last one
    num_tokens: jax.Array  # i32[B]
    columns: jax.Array  # i32[B], characters
    logprobs: jax.Array  # f32[B], of all tokens together
    is_over: jax.Array  # bool[B], whether nothing can follow


class Choices(NamedTuple):
    """Next tokens of each line: the likeliest ones, without impossible ones."""

    tokens: jax.Array  # i32[B, A], the likeliest first
    logprobs: jax.Array  # f32[B, A], -inf where the token cannot follow

    @classmethod
    def none(cls, *shape: int) -> "Choices":
        """Return that nothing can follow."""
        return cls(jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf))

    @property
    def best(self) -> tuple[jax.Array, jax.Array]:
        """The likeliest token that can follow, i32[B], and its log-probability."""
        column = jnp.argmax(self.logprobs, axis=1)[:, None]
        tokens = jnp.take_along_axis(self.tokens, column, axis=1)[:, 0]
        return tokens, self.logprobs.max(axis=1)

    @property
    def are_none(self) -> jax.Array:
        """Where nothing can follow, bool[B]."""
        return ~jnp.isfinite(self.logprobs).any(axis=1)


class Puzzle(NamedTuple):
    """The lines to fill, and the tokenizer's data about their tokens."""

    widths: jax.Array  # i32[B], the columns of the full stops
    sizes: jax.Array  # i32[V], characters of each token
    is_allowed: jax.Array  # bool[V], whether a sentence may have it
    is_word_end: jax.Array  # bool[V], whether a full stop may follow
    full_stop: jax.Array  # i32[], the token

    def begin(self, max_tokens: int) -> Line:
        """Return empty lines of at most `max_tokens`."""
        none = jnp.zeros_like(self.widths)
        tokens = jnp.full((none.shape[0], max_tokens), -1, jnp.int32)
        return Line(tokens, none, none, none.astype(jnp.float32), none > 0)

    def choose(self, logits: jax.Array, line: Line, num_choices: int) -> Choices:
        """Return the next tokens of each line, by the model's logits, f32[B, V]."""
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
        """Write a token in each line that is not over.

        Args:
          line: the lines.
          tokens: i32[B].
          logprobs: f32[B]; -inf where none can follow, and the line is over.
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
        """Return the values of lines that are over, f32[B].

        How likely a token of the line is, in the geometric mean, if the full stop is in
        its column; else 0.
        """
        count = jnp.maximum(line.num_tokens, 1).astype(jnp.float32)
        return jnp.where(
            line.columns == self.widths, jnp.exp(line.logprobs / count), 0.0
        )


def read_vocabulary(tokenizer: Any, size: int) -> dict[str, np.ndarray]:
    """Return the fields of a `Puzzle` that a tokenizer decides.

    A sentence has letters, spaces, commas, hyphens and apostrophes. A full stop may
    follow two letters, so that no "e.g." ends a sentence.
    """
    # Behind a letter, as some tokenizers decode no space at the beginning.
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

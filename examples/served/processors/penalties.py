"""Penalties for tokens that a text has already, as OpenAI's API counts them.

A logit is lowered once for a token that the new text has (presence), and once for each
time that it has it (frequency). The prompt does not count.

Symbols: N texts, M variants, V tokens in the vocabulary.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.logits_processors import LogitsProcessor


class _Rows(NamedTuple):
    """Variants and token counts of N texts."""

    variants: jax.Array  # i32[N]
    counts: jax.Array  # i32[N, V], how often each has each token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CountPenalties(LogitsProcessor):
    """Penalties of M variants."""

    presence: jax.Array  # f32[M]
    frequency: jax.Array  # f32[M]
    # V. Static: rows of the state are as wide.
    vocabulary_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_variants(self) -> int:
        """M."""
        return int(self.presence.shape[0])

    @property
    def num_end_tokens(self) -> int:
        """None: this ends no text."""
        return 0

    def begin(self, variants: jax.Array, prompts: jax.Array) -> _Rows:
        """Return rows that have counted nothing."""
        del prompts
        shape = (variants.shape[0], self.vocabulary_size)
        return _Rows(variants, jnp.zeros(shape, jnp.int32))

    def process(self, state: _Rows, logits: jax.Array) -> jax.Array:
        """Lower the logits of tokens that were counted."""
        counts = state.counts.astype(jnp.float32)
        presence = jnp.asarray(self.presence)[state.variants][:, None]
        frequency = jnp.asarray(self.frequency)[state.variants][:, None]
        return logits - jnp.minimum(counts, 1.0) * presence - counts * frequency

    def advance(self, state: _Rows, tokens: jax.Array) -> _Rows:
        """Count a token of each text."""
        row = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        # Values that are no tokens go to a column of their own, to be dropped.
        column = jnp.where(tokens >= 0, tokens, self.vocabulary_size)
        return state._replace(counts=state.counts.at[row, column].add(1, mode="drop"))

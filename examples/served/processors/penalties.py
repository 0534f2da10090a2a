"""Presence and frequency penalties, as in OpenAI's API.

The presence penalty is subtracted once from the logit of each generated token, the
frequency penalty once per occurrence. The prompt does not count.

Symbols: N sequences, M variants, V tokens in the vocabulary.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.logits_processors import LogitsProcessor


class _Rows(NamedTuple):
    """Variants and token counts of N sequences."""

    variants: jax.Array  # i32[N]
    counts: jax.Array  # i32[N, V], occurrences of each token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CountPenalties(LogitsProcessor):
    """Penalties of M variants."""

    presence: jax.Array  # f32[M]
    frequency: jax.Array  # f32[M]
    # V. Static, since it is the width of the state.
    vocabulary_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_variants(self) -> int:
        """Number of variants M."""
        return int(self.presence.shape[0])

    @property
    def num_end_tokens(self) -> int:
        """0, since penalties end no sequence."""
        return 0

    def begin(self, variants: jax.Array, prompts: jax.Array) -> _Rows:
        """Return zero counts."""
        del prompts
        shape = (variants.shape[0], self.vocabulary_size)
        return _Rows(variants, jnp.zeros(shape, jnp.int32))

    def process(self, state: _Rows, logits: jax.Array) -> jax.Array:
        """Subtract the penalties of counted tokens."""
        counts = state.counts.astype(jnp.float32)
        presence = jnp.asarray(self.presence)[state.variants][:, None]
        frequency = jnp.asarray(self.frequency)[state.variants][:, None]
        return logits - jnp.minimum(counts, 1.0) * presence - counts * frequency

    def advance(self, state: _Rows, tokens: jax.Array) -> _Rows:
        """Count one token per sequence."""
        row = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        # Negative values are not tokens; index V is out of range and dropped.
        column = jnp.where(tokens >= 0, tokens, self.vocabulary_size)
        return state._replace(counts=state.counts.at[row, column].add(1, mode="drop"))

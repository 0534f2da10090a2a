"""What speculation keeps from step to step, and hands from window to window.

Symbols: W places, K numbers of sequences.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.model.prefill import count_cached
from jkv.decoding.speculation.pace import Pace
from jkv.state import NO_SEQUENCE, Cache


class DraftRows(NamedTuple):
    """What a draft model has computed of the texts in W places."""

    cache: Cache
    seq_ids: jax.Array  # i32[W], the row of each place, -1 where there was none
    owners: jax.Array  # i32[W], the sequence of which the row has tokens, -1 of none

    @property
    def lengths(self) -> jax.Array:
        """Tokens that the draft has of each place's text, i32[W]."""
        return count_cached(self.cache, self.seq_ids)


class SpeculationState(NamedTuple):
    """How guesses did of late, and what a draft model has."""

    pace: Pace
    rows: DraftRows | None  # of a draft model

    @property
    def draft_cache(self) -> Cache | None:
        """The cache of a draft model, None without one."""
        return self.rows and self.rows.cache

    def forget(self, sequences: jax.Array) -> "SpeculationState":
        """Forget texts whose numbers pass to others, i32[K]."""

        def keep(texts: jax.Array) -> jax.Array:
            passes = jnp.any(texts[:, None] == sequences[None], axis=1)
            return jnp.where(passes, NO_SEQUENCE, texts)

        rows = self.rows
        return SpeculationState(
            pace=self.pace._replace(texts=keep(self.pace.texts)),
            rows=rows and rows._replace(owners=keep(rows.owners)),
        )

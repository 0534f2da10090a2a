"""A beam search under way: what was asked, what runs, and what has come of it.

Symbols: Q prompts, K beams of each, G most new tokens.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jkv.decoding.beams.hypotheses import Beams, Hypotheses
from jkv.decoding.texts.prompts import Prompts
from jkv.decoding.texts.results import BeamStatistics, FinishReason
from jkv.state import NO_SEQUENCE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SearchState:
    """All searches of a call: those that run, in step, and those that wait."""

    prompts: Prompts  # what is continued
    reasons: jax.Array  # i32[Q], RUNNING while a search runs or waits
    is_running: jax.Array  # bool[Q], which of them run
    seq_ids: jax.Array  # i32[Q, K], the cache's row of each beam, -1 where none
    beams: Beams  # texts that run; their last token is not in the cache
    hypotheses: Hypotheses  # texts that have ended
    length: jax.Array  # i32[], new tokens of each beam that runs
    statistics: BeamStatistics
    # Of what steers the beams, a pytree of arrays [Q * K, ...]; None without.
    steering_state: Any = None

    @classmethod
    def begin(
        cls, prompts: Prompts, reasons: jax.Array, num_beams: int, max_new_tokens: int
    ) -> "SearchState":
        """Let all prompts wait but those that have a reason to end, i32[Q]."""
        sizes = reasons.shape[0], num_beams
        return cls(
            prompts=prompts,
            reasons=reasons,
            is_running=jnp.zeros(reasons.shape, bool),
            seq_ids=jnp.full(sizes, NO_SEQUENCE, jnp.int32),
            beams=Beams.fresh(*sizes, max_new_tokens),
            hypotheses=Hypotheses.none(*sizes, max_new_tokens),
            length=jnp.zeros((), jnp.int32),
            statistics=BeamStatistics.zeros(),
        )

    @property
    def is_open(self) -> jax.Array:
        """Which searches have not ended: they run or wait, bool[Q]."""
        return self.reasons == FinishReason.RUNNING

    @property
    def num_beams(self) -> int:
        """Beams of each prompt, K."""
        return self.seq_ids.shape[1]

    @property
    def first_seq_ids(self) -> jax.Array:
        """The row of the first beam of each prompt that runs, i32[Q], else -1."""
        return jnp.where(self.is_running, self.seq_ids[:, 0], NO_SEQUENCE)

    @property
    def flat_seq_ids(self) -> jax.Array:
        """The rows of beams that run, prompt by prompt, i32[Q * K], else -1."""
        rows = jnp.where(self.is_running[:, None], self.seq_ids, NO_SEQUENCE)
        return rows.reshape(-1)

    def count(self, **counts: jax.Array) -> "SearchState":
        return dataclasses.replace(self, statistics=self.statistics.add(**counts))

    def end(self, ends: jax.Array, reasons: jax.Array) -> "SearchState":
        """End searches, bool[Q], for these reasons, i32[Q] or i32[]."""
        return dataclasses.replace(
            self,
            is_running=self.is_running & ~ends,
            reasons=jnp.where(ends, reasons, self.reasons),
        )

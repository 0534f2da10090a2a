"""Pace of speculation: the steps and sequences to speculate in.

A step with draft tokens takes longer. Its cost cannot be measured inside jit and is
given by the caller; its gain is the recent acceptance rate, tracked per sequence. A
sequence gets draft tokens if its own rate covers the cost, and a step speculates if all
of them together do. Otherwise some steps are plain, then one tries again at the
break-even rate; each failure lengthens the pause.

Symbols: W places.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.speculation.draft_tokens import DraftTokens

# Weight of the newest step in the acceptance rate.
_WEIGHT = 0.75

# Drift per step towards the typical rate, for sequences without draft tokens.
_DRIFT = 1 / 256

# Plain steps after the first failure, the factor for each further one, and the most.
_SHORTEST_PAUSE, _LONGER = 16, 4
_LONGEST_PAUSE = 512

# Initial acceptance rate, and the gain required of a try.
_FIRST_RATE = 0.25
_JUST_ENOUGH = 1.1


class Pace(NamedTuple):
    """Recent acceptance rates."""

    sequences: jax.Array  # i32[W], the sequence in each place
    rates: jax.Array  # f32[W], its acceptance rate
    typical: jax.Array  # f32[], acceptance rate of all sequences
    hope: jax.Array  # f32[], acceptance rate assumed by a try
    pause: jax.Array  # i32[], plain steps after the next failure
    wait: jax.Array  # i32[], steps until the next try

    @classmethod
    def begin(cls, num_places: int, num_tokens: int, cost: float) -> "Pace":
        """Return a rate at which speculation pays; one failure lowers it."""
        rate = max(_FIRST_RATE, 1.5 * (cost - 1) / num_tokens)
        return cls(
            sequences=jnp.full((num_places,), -1, jnp.int32),
            rates=jnp.full((num_places,), rate, jnp.float32),
            typical=jnp.asarray(rate, jnp.float32),
            hope=jnp.zeros((), jnp.float32),
            pause=jnp.asarray(_SHORTEST_PAUSE, jnp.int32),
            wait=jnp.zeros((), jnp.int32),
        )

    def follow(self, sequences: jax.Array) -> "Pace":
        """Return the pace for these sequences in the places, i32[W]."""
        rates = jnp.where(sequences == self.sequences, self.rates, self.typical)
        return self._replace(sequences=sequences, rates=rates)

    def choose(
        self, drafted: DraftTokens, running: jax.Array, cost: float
    ) -> jax.Array:
        """Return the sequences to speculate for in this step, bool[W]."""
        known = _find_profitable(self.rates, drafted, running, cost)
        hoped = jnp.maximum(self.rates, self.hope)
        tried = _find_profitable(hoped, drafted, running, cost) & (self.wait == 0)
        return jnp.where(jnp.any(known), known, tried)

    def after_step(self) -> "Pace":
        """Return the pace after a plain step."""
        return self._replace(wait=jnp.maximum(self.wait - 1, 0))

    def after_verification(
        self,
        drafted: DraftTokens,
        accepted: jax.Array,
        running: jax.Array,
        cost: float,
    ) -> "Pace":
        """Return the pace after a step with `accepted` draft tokens, i32[W]."""
        # Certain draft tokens carry no information about the others.
        uncertain = drafted.counts - drafted.certain
        accepted = jnp.maximum(accepted - drafted.certain, 0)
        is_drafted = uncertain > 0
        share = _divide(accepted, uncertain)
        number = jnp.sum(uncertain, dtype=jnp.int32)
        all_share = _divide(jnp.sum(accepted, dtype=jnp.int32), number)
        typical = _average(self.typical, all_share, _WEIGHT)
        typical = jnp.where(number > 0, typical, self.typical)
        rates = jnp.where(
            is_drafted,
            _average(self.rates, share, _WEIGHT),
            _average(self.rates, typical, _DRIFT),
        )
        fails = ~jnp.any(_find_profitable(rates, drafted, running, cost))
        # The next try is assumed to have as many draft tokens.
        least = jnp.float32(cost - 1) * _divide(running, number)
        longer = jnp.minimum(_LONGER * self.pause, _LONGEST_PAUSE)
        return self._replace(
            rates=rates,
            typical=typical,
            hope=jnp.where(fails, _JUST_ENOUGH * least, self.hope),
            pause=jnp.where(fails, longer, _SHORTEST_PAUSE),
            wait=jnp.where(fails, self.pause, 0),
        )


def _find_profitable(
    rates: jax.Array, drafted: DraftTokens, running: jax.Array, cost: float
) -> jax.Array:
    """Return the sequences worth speculating for, bool[W], if they pay together."""
    counts, certain = drafted.counts, drafted.certain
    expected = certain.astype(jnp.float32)
    expected += rates * (counts - certain).astype(jnp.float32)
    is_worthy = (counts > 0) & (1 + expected >= cost)
    brought = jnp.sum(jnp.where(is_worthy, expected, 0.0))
    return is_worthy & (brought >= (cost - 1) * running.astype(jnp.float32))


def _divide(part: jax.Array, whole: jax.Array) -> jax.Array:
    return part.astype(jnp.float32) / jnp.maximum(whole, 1).astype(jnp.float32)


def _average(old: jax.Array, new: jax.Array, weight: float) -> jax.Array:
    return (1 - weight) * old + weight * new

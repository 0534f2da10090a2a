"""Which steps of decoding guess tokens, and for which texts.

A step with guesses takes longer, which cannot be measured inside a jit: the caller
says how much. It gains the share of guesses that were right lately, which is kept for
each text. Tokens of a text are guessed if its own share is worth the time, and a step
guesses if those of all texts together are. Otherwise some steps go without guesses, and
then one tries again with the share that just pays; each failure makes the pause longer.

Symbols: W places.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.speculation.guesses import Guesses

# How much the newest step weighs in the share of right guesses.
_WEIGHT = 0.75

# How fast a text for which nothing is guessed is taken to be like the others, a step.
_DRIFT = 1 / 256

# Steps without guesses after the first failure, by what each further one multiplies
# them, and the most.
_SHORTEST_PAUSE, _LONGER = 16, 4
_LONGEST_PAUSE = 512

# The share that is expected at first, and what one try must bring to be made.
_FIRST_RATE = 0.25
_JUST_ENOUGH = 1.1


class Pace(NamedTuple):
    """How well guesses did of late."""

    texts: jax.Array  # i32[W], the sequence in each place
    rates: jax.Array  # f32[W], share of its guesses that were right
    typical: jax.Array  # f32[], the share of all texts
    hope: jax.Array  # f32[], the share that a try counts on
    pause: jax.Array  # i32[], steps that the next failure costs
    wait: jax.Array  # i32[], steps until the next try

    @classmethod
    def begin(cls, num_places: int, num_tokens: int, cost: float) -> "Pace":
        """Begin with a rate at which guesses pay; one failure lowers it."""
        rate = max(_FIRST_RATE, 1.5 * (cost - 1) / num_tokens)
        return cls(
            texts=jnp.full((num_places,), -1, jnp.int32),
            rates=jnp.full((num_places,), rate, jnp.float32),
            typical=jnp.asarray(rate, jnp.float32),
            hope=jnp.zeros((), jnp.float32),
            pause=jnp.asarray(_SHORTEST_PAUSE, jnp.int32),
            wait=jnp.zeros((), jnp.int32),
        )

    def follow(self, texts: jax.Array) -> "Pace":
        """Return the pace with these sequences in the places, i32[W]."""
        rates = jnp.where(texts == self.texts, self.rates, self.typical)
        return self._replace(texts=texts, rates=rates)

    def choose(self, guesses: Guesses, running: jax.Array, cost: float) -> jax.Array:
        """Tell for which texts to guess in this step, bool[W]; for none if plain."""
        known = _find_worthy(self.rates, guesses, running, cost)
        hoped = jnp.maximum(self.rates, self.hope)
        tried = _find_worthy(hoped, guesses, running, cost) & (self.wait == 0)
        return jnp.where(jnp.any(known), known, tried)

    def after_step(self) -> "Pace":
        """Return the pace after a step without guesses."""
        return self._replace(wait=jnp.maximum(self.wait - 1, 0))

    def after_guesses(
        self,
        guesses: Guesses,
        accepted: jax.Array,
        running: jax.Array,
        cost: float,
    ) -> "Pace":
        """Return the pace after guesses, of which some were right, i32[W]."""
        # Those that cannot fail tell nothing about the others.
        uncertain = guesses.counts - guesses.certain
        accepted = jnp.maximum(accepted - guesses.certain, 0)
        is_guessed = uncertain > 0
        share = _divide(accepted, uncertain)
        number = jnp.sum(uncertain, dtype=jnp.int32)
        all_share = _divide(jnp.sum(accepted, dtype=jnp.int32), number)
        typical = _average(self.typical, all_share, _WEIGHT)
        typical = jnp.where(number > 0, typical, self.typical)
        rates = jnp.where(
            is_guessed,
            _average(self.rates, share, _WEIGHT),
            _average(self.rates, typical, _DRIFT),
        )
        fails = ~jnp.any(_find_worthy(rates, guesses, running, cost))
        # The next try is made with as many guesses.
        least = jnp.float32(cost - 1) * _divide(running, number)
        longer = jnp.minimum(_LONGER * self.pause, _LONGEST_PAUSE)
        return self._replace(
            rates=rates,
            typical=typical,
            hope=jnp.where(fails, _JUST_ENOUGH * least, self.hope),
            pause=jnp.where(fails, longer, _SHORTEST_PAUSE),
            wait=jnp.where(fails, self.pause, 0),
        )


def _find_worthy(
    rates: jax.Array, guesses: Guesses, running: jax.Array, cost: float
) -> jax.Array:
    """Tell which guesses are worth a step, bool[W], if all of them together are."""
    counts, certain = guesses.counts, guesses.certain
    expected = certain.astype(jnp.float32)
    expected += rates * (counts - certain).astype(jnp.float32)
    is_worthy = (counts > 0) & (1 + expected >= cost)
    brought = jnp.sum(jnp.where(is_worthy, expected, 0.0))
    return is_worthy & (brought >= (cost - 1) * running.astype(jnp.float32))


def _divide(part: jax.Array, whole: jax.Array) -> jax.Array:
    return part.astype(jnp.float32) / jnp.maximum(whole, 1).astype(jnp.float32)


def _average(old: jax.Array, new: jax.Array, weight: float) -> jax.Array:
    return (1 - weight) * old + weight * new

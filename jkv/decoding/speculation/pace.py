"""When to guess: while it pays, and after a failure again only after a while.

What a step costs cannot be measured inside a jit, so the caller says how much longer
one with guesses takes. What it brings is the share of the guesses that were right, of
late. Where the tokens to be expected are fewer than the cost, steps go without guesses,
and a later one tries again; each failure doubles the time until then.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# How much the newest step weighs in the share of right guesses.
_WEIGHT = 0.75

# Steps without guesses after a failure, and at most.
_SHORTEST_PAUSE = 32
_LONGEST_PAUSE = 512


class Pace(NamedTuple):
    """How well guesses did of late."""

    rate: jax.Array  # f32[], share of the guesses that were right
    pause: jax.Array  # i32[], steps that the next failure costs
    wait: jax.Array  # i32[], steps until the next try

    @classmethod
    def begin(cls) -> "Pace":
        """Begin with hope."""
        return cls(
            rate=jnp.asarray(0.5, jnp.float32),
            pause=jnp.asarray(_SHORTEST_PAUSE, jnp.int32),
            wait=jnp.zeros((), jnp.int32),
        )

    def pays(self, guesses: jax.Array, running: jax.Array, cost: float) -> jax.Array:
        """Tell whether so many guesses, i32[], for so many sequences pay, bool[]."""
        each = guesses.astype(jnp.float32) / jnp.maximum(running, 1).astype(jnp.float32)
        return (guesses > 0) & (1 + self.rate * each >= cost)

    def after_step(self) -> "Pace":
        """Return the pace after a step without guesses."""
        return self._replace(wait=jnp.maximum(self.wait - 1, 0))

    def after_guesses(
        self,
        guesses: jax.Array,
        accepted: jax.Array,
        running: jax.Array,
        cost: float,
    ) -> "Pace":
        """Return the pace after guesses, i32[], of which some were right."""
        share = accepted.astype(jnp.float32) / guesses.astype(jnp.float32)
        rate = (1 - _WEIGHT) * self.rate + _WEIGHT * share
        fails = ~self._replace(rate=rate).pays(guesses, running, cost)
        # The next try is made with as many guesses; one failure then ends it.
        each = guesses.astype(jnp.float32) / jnp.maximum(running, 1).astype(jnp.float32)
        least = (jnp.float32(cost) - 1) / each
        longer = jnp.minimum(2 * self.pause, _LONGEST_PAUSE)
        return Pace(
            rate=jnp.where(fails, 1.1 * least, rate),
            pause=jnp.where(fails, longer, _SHORTEST_PAUSE),
            wait=jnp.where(fails, self.pause, 0),
        )

"""The variants of what steers texts, under other numbers.

So things with different variants can be chained, and a row of a table can say for each
of them which variant a text takes, or none.

Symbols: N texts, K rows, M variants.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.status import UsageError
from jkv.steering.protocol import Steering
from jkv.steering.tables import check_integers


def renumber(steering: Steering, numbers: jax.Array) -> Steering:
    """Return what steers as another does, with variants of its own.

    Args:
      steering: what steers.
      numbers: i32[M], which variant of it each variant takes, -1 for none: then a text
        is not steered by it. They are an array like others, which may be exchanged
        without compiling.

    Returns:
      A `Steering` with M variants.

    Raises:
      ValueError: for numbers that are no i32[M], or, outside of jit, no variants.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import MinimumLength, TokenBias, chain, renumber
      >>> least = MinimumLength(jnp.array([2]), min_new_tokens=jnp.array([5, 9]))
      >>> bias = TokenBias(jnp.array([1]), jnp.array([3.0]))
      >>> both = chain(
      ...     renumber(least, jnp.array([-1, 1, 0])),
      ...     renumber(bias, jnp.array([0, -1, 0])),
      ... )
      >>> state = both.begin(jnp.array([0, 1, 2]), jnp.array([[3], [3], [3]]))
      >>> both.steer(state, jnp.ones((3, 3))).tolist()
      [[1.0, 4.0, 1.0], [1.0, 1.0, -inf], [1.0, 4.0, -inf]]
    """
    array = check_integers("renumber: numbers", numbers, ("[M]",))
    if not isinstance(array, jax.core.Tracer):
        found, most = np.asarray(array), steering.num_variants
        wrong = found[(found < -1) | (found >= most)]
        if wrong.size:
            raise UsageError(
                f"renumber: variants of {type(steering).__name__} are from 0 to "
                f"{most - 1}, or -1 for none; got {int(wrong[0])}"
            )
    return Renumbered(steering, numbers)


class _Rows(NamedTuple):
    """What is known of N texts."""

    inner: Any  # a pytree of arrays [N, ...]
    is_steered: jax.Array  # bool[N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Renumbered(Steering):
    """What `renumber` returns."""

    steering: Steering
    numbers: jax.Array  # i32[M]

    @property
    def num_variants(self) -> int:
        """M."""
        return self.numbers.shape[-1]

    @property
    def num_end_tokens(self) -> int:
        return self.steering.num_end_tokens

    def begin(self, variants: jax.Array, prompts: jax.Array) -> _Rows:
        """Return the rows of the variants that are meant."""
        numbers = jnp.asarray(self.numbers, jnp.int32)
        meant = jnp.where(variants < 0, -1, numbers[jnp.maximum(variants, 0)])
        return _Rows(self.steering.begin(meant, prompts), meant >= 0)

    def steer(self, state: _Rows, logits: jax.Array) -> jax.Array:
        steered = self.steering.steer(state.inner, logits)
        return jnp.where(state.is_steered[:, None], steered, logits)

    def advance(self, state: _Rows, tokens: jax.Array) -> _Rows:
        tokens = jnp.where(state.is_steered, tokens, -1)
        return state._replace(inner=self.steering.advance(state.inner, tokens))

    def ended(self, state: _Rows) -> jax.Array | None:
        """Return which of them have ended, bool[K]."""
        ended = self.steering.ended(state.inner)
        return None if ended is None else ended & state.is_steered

    def forced(self, state: _Rows) -> jax.Array | None:
        """Return what is forced on them, i32[K], -1 for none."""
        forced = self.steering.forced(state.inner)
        return None if forced is None else jnp.where(state.is_steered, forced, -1)

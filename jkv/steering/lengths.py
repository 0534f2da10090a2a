"""No end of a text before it has so many new tokens.

Symbols: N texts, E end tokens, M variants.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.status import UsageError
from jkv.steering.protocol import EndsNothing
from jkv.steering.tables import check_integers, count_variants, find_rows
from jkv.steering.tokens import forbid


class _LengthRows(NamedTuple):
    """What is known of N texts."""

    lacks: jax.Array  # i32[N], tokens before each may end
    variants: jax.Array  # i32[N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MinimumLength(EndsNothing):
    """No end token before a text has so many new tokens.

    End tokens that are given to the loop (`stop_tokens`) are not known here: name them
    again. Stop sequences are not forbidden.

    Args:
      end_tokens: i32[E], those that end a text, -1 for none; i32[M, E] for tokens of
        its own for each of M variants.
      min_new_tokens: i32[] or int, new tokens before an end token may come; i32[M] for
        a number of its own for each of M variants.

    Raises:
      ValueError: when a text begins, if they are no integers or have other axes, or
        different numbers of variants.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import MinimumLength
      >>> short = MinimumLength(jnp.array([2]), min_new_tokens=1)
      >>> state = short.begin(jnp.array([0]), jnp.array([[5, 6]]))
      >>> short.steer(state, jnp.ones((1, 4))).tolist()
      [[1.0, 1.0, -inf, 1.0]]
      >>> short.steer(short.advance(state, jnp.array([3])), jnp.ones((1, 4))).tolist()
      [[1.0, 1.0, 1.0, 1.0]]
    """

    end_tokens: jax.Array  # i32[E], or i32[M, E] of M variants
    min_new_tokens: jax.Array | int  # i32[], or i32[M] of M variants

    @property
    def num_variants(self) -> int:
        """M, or one."""
        counts = (
            count_variants(self.end_tokens, 1),
            count_variants(self.min_new_tokens, 0),
        )
        return max(counts)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> _LengthRows:
        """Return how many tokens each text lacks before it may end."""
        del prompts
        ends = check_integers("MinimumLength.end_tokens", self.end_tokens, "E | M E")
        least = check_integers(
            "MinimumLength.min_new_tokens", self.min_new_tokens, "| M"
        )
        if ends.ndim == 2 and least.ndim == 1 and len(ends) != len(least):
            raise UsageError(
                f"MinimumLength: end_tokens have {len(ends)} variants and "
                f"min_new_tokens {len(least)}"
            )
        return _LengthRows(find_rows(least, 0, variants), variants)

    def steer(self, state: _LengthRows, logits: jax.Array) -> jax.Array:
        """Forbid the end tokens while tokens lack."""
        ends = jnp.asarray(self.end_tokens, jnp.int32)
        # One row for all texts: XLA puts it where the logits are read.
        ends = ends[None] if ends.ndim == 1 else ends[state.variants]
        without = forbid(jnp.zeros((len(ends), logits.shape[1]), jnp.float32), ends)
        return jnp.where(state.lacks[:, None] > 0, logits + without, logits)

    def advance(self, state: _LengthRows, tokens: jax.Array) -> _LengthRows:
        """Count the token."""
        return state._replace(lacks=state.lacks - (tokens >= 0).astype(jnp.int32))

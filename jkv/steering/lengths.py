"""No end of a text before it has so many new tokens.

Symbols: N texts, E end tokens, M variants.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.steering.logits import forbid
from jkv.steering.protocol import Steering
from jkv.steering.tables import check_integers, count_variants, find_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MinimumLength(Steering):
    """No end token before a text has so many new tokens.

    End tokens that are given to the loop (`stop_tokens`) are not known here: name them
    again. Stop sequences are not forbidden.

    Args:
      end_tokens: i32[E], those that end a text, -1 for none.
      min_new_tokens: i32[] or int, new tokens before an end token may come; i32[M] for
        a number of its own for each of M variants.

    Raises:
      ValueError: when a text begins, if they are no integers or have other axes.

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

    end_tokens: jax.Array  # i32[E]
    min_new_tokens: jax.Array | int  # i32[], or i32[M] of M variants

    @property
    def num_variants(self) -> int:
        """M, or one."""
        return count_variants(self.min_new_tokens, 0)

    @property
    def num_end_tokens(self) -> int:
        """None: this ends no text."""
        return 0

    def begin(self, variants: jax.Array, prompts: jax.Array) -> jax.Array:
        """Return how many tokens each text lacks before it may end, i32[N]."""
        del prompts
        check_integers("MinimumLength.end_tokens", self.end_tokens, ("[E]",))
        least = check_integers(
            "MinimumLength.min_new_tokens", self.min_new_tokens, ("[]", "[M]")
        )
        return find_rows(least, 0, variants)

    def steer(self, state: jax.Array, logits: jax.Array) -> jax.Array:
        """Forbid the end tokens while tokens lack."""
        ends = jnp.asarray(self.end_tokens, jnp.int32)
        return forbid(logits, jnp.where(state[:, None] > 0, ends[None], -1))

    def advance(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
        """Count the token."""
        return state - (tokens >= 0).astype(jnp.int32)

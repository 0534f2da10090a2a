"""Tokens of which texts are made, all others forbidden.

Symbols: N texts, K rows, A tokens that are allowed, M variants.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.steering.protocol import Unchanging
from jkv.steering.tables import check_integers, count_variants, find_rows
from jkv.steering.tokens import find_columns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AllowedTokens(Unchanging):
    """The only tokens that a text may have.

    It is the `allowed_token_ids` of vLLM's interface
    (https://docs.vllm.ai/en/latest/api/vllm/sampling_params/). End tokens are no
    exception: name them, too, if a text may end. Ids that the model does not have allow
    nothing.

    Args:
      tokens: i32[A], -1 for none; i32[M, A] for tokens of its own for each of M
        variants.

    Raises:
      ValueError: when a text begins, if they are no integers or have other axes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import AllowedTokens
      >>> digits = AllowedTokens(jnp.array([1, 3, -1]))
      >>> state = digits.begin(jnp.array([0]), jnp.array([[5]]))
      >>> digits.steer(state, jnp.ones((1, 4))).tolist()
      [[-inf, 1.0, -inf, 1.0]]
    """

    tokens: jax.Array  # i32[A], or i32[M, A] of M variants

    @property
    def num_variants(self) -> int:
        """M, or one."""
        return count_variants(self.tokens, 1)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> jax.Array:
        """Return the variant of each text, i32[N]."""
        del prompts
        check_integers("AllowedTokens.tokens", self.tokens, "A | M A")
        return variants

    def steer(self, state: jax.Array, logits: jax.Array) -> jax.Array:
        """Forbid all others."""
        tokens = find_rows(jnp.asarray(self.tokens, jnp.int32), 1, state)
        mask = jnp.zeros(logits.shape, bool)
        mask = mask.at[find_columns(tokens, logits)].set(True, mode="drop")
        return jnp.where(mask, logits, -jnp.inf)

"""A number that is added to the logit of a token.

Symbols: N texts, E tokens that are named, M variants.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.steering.protocol import Unchanging
from jkv.steering.tables import check_integers, count_variants
from jkv.steering.tokens import find_columns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TokenBias(Unchanging):
    """Numbers that are added to the logits of some tokens, in every step.

    It is the `logit_bias` of OpenAI's interface
    (https://platform.openai.com/docs/api-reference/completions). There -100 should mean
    a ban; here it is a number like any other, and a token at -100 is still chosen where
    nothing else is allowed. Give -inf to forbid a token, and never inf. Numbers of a
    token that is named twice add up.

    Args:
      tokens: i32[E], -1 for none; i32[M, E] for tokens of its own for each of M
        variants.
      values: f32, shaped as `tokens`.

    Raises:
      ValueError: when a text begins, if they have other types or axes, or different
        shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import TokenBias
      >>> bias = TokenBias(jnp.array([1, 3]), jnp.array([0.5, -jnp.inf]))
      >>> bias.steer(bias.begin(jnp.array([0]), jnp.array([[5]])), jnp.ones((1, 4)))
      Array([[ 1. ,  1.5,  1. , -inf]], dtype=float32)
    """

    tokens: jax.Array  # i32[E], or i32[M, E] of M variants
    values: jax.Array  # f32[E], or f32[M, E]

    @property
    def num_variants(self) -> int:
        """M, or one."""
        return count_variants(self.tokens, 1)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> jax.Array:
        """Return the variant of each text, i32[N]."""
        del prompts
        tokens = check_integers("TokenBias.tokens", self.tokens, "E | M E")
        axes = " ".join(map(str, tokens.shape))
        values = jnp.asarray(self.values)
        expect(
            "TokenBias.values", values, axes, kind=jnp.number, why="shaped as tokens"
        )
        return variants

    def steer(self, state: jax.Array, logits: jax.Array) -> jax.Array:
        """Add the numbers."""
        tokens = jnp.asarray(self.tokens, jnp.int32)
        values = jnp.asarray(self.values, jnp.float32)
        if tokens.ndim == 1:
            # One row for all texts: XLA puts it where the logits are read.
            tokens, values = tokens[None], values[None]
        else:
            tokens, values = tokens[state], values[state]
        row = jnp.zeros((tokens.shape[0], logits.shape[1]), jnp.float32)
        row = row.at[find_columns(tokens, row)].add(values, mode="drop")
        return logits + row

"""Texts that are never written.

Symbols: N texts, K rows, F texts that are banned, C tokens of the longest, M variants.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.steering.protocol import EndsNothing
from jkv.steering.tables import check_integers, count_variants, find_rows
from jkv.steering.tokens import align_right, find_newest, forbid, push


class _BanRows(NamedTuple):
    """What is known of N texts."""

    newest: jax.Array  # i32[N, C - 1]
    variants: jax.Array  # i32[N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BannedTexts(EndsNothing):
    """Lists of tokens that a text never has.

    The last token of a list is forbidden where those before it are the newest of the
    text, the end of the prompt counted; a list of one token is always forbidden. That
    is what transformers' `NoBadWordsLogitsProcessor` does where the text has at least
    as many tokens as the list. A tokenizer may spell the same words with other tokens,
    which are not banned: give each spelling.

    Args:
      texts: i32[F, C], -1 after each one's end; i32[M, F, C] for lists of its own for
        each of M variants.

    Raises:
      ValueError: when a text begins, if they are no integers or have other axes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import BannedTexts
      >>> banned = BannedTexts(jnp.array([[1, 2], [3, -1]]))
      >>> state = banned.begin(jnp.array([0]), jnp.array([[7, 1]]))
      >>> banned.steer(state, jnp.ones((1, 5))).tolist()
      [[1.0, 1.0, -inf, -inf, 1.0]]
    """

    texts: jax.Array  # i32[F, C], or i32[M, F, C] of M variants

    @property
    def num_variants(self) -> int:
        """M, or one."""
        return count_variants(self.texts, 2)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> _BanRows:
        """Return the newest tokens of each text, and its variant."""
        texts = check_integers("BannedTexts.texts", self.texts, "F C | M F C")
        return _BanRows(find_newest(prompts, texts.shape[-1] - 1), variants)

    def steer(self, state: _BanRows, logits: jax.Array) -> jax.Array:
        """Forbid what would complete one of them."""
        texts = align_right(jnp.asarray(self.texts, jnp.int32))
        texts = find_rows(texts, 2, state.variants)
        before, last = texts[:, :, :-1], texts[:, :, -1]
        is_there = (before < 0) | (before == state.newest[:, None])
        return forbid(logits, jnp.where(jnp.all(is_there, axis=2), last, -1))

    def advance(self, state: _BanRows, tokens: jax.Array) -> _BanRows:
        """Note the token."""
        return state._replace(newest=push(state.newest, tokens))

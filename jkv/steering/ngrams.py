"""No run of so many tokens twice in a text.

The rule is that of fairseq's and transformers' `no_repeat_ngram_size`; Paulus, Xiong
and Socher used it for trigrams (section 2.5 of arXiv 1705.04304).

Symbols: K rows, P most prompt tokens, T tokens of a text that are kept, V tokens in the
vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.status import UsageError
from jkv.steering.protocol import EndsNothing
from jkv.steering.tokens import find_newest, forbid, push


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class NoRepeatedNgrams(EndsNothing):
    """No n-gram twice in a text, its prompt counted.

    A token is forbidden if the text has, anywhere, the tokens before it and it, in a
    row. The rows of the state are whole texts: P + `max_new_tokens` tokens. Of a text
    that has more than that the oldest are forgotten.

    A step compares every token of the text with the newest `size` - 1.

    Args:
      size: tokens of an n-gram; 1 forbids any token that the text has.
      max_new_tokens: as many as a text may get, in all calls that go on with it.

    Raises:
      ValueError: when a text begins, if one of them is less than 1 or no int.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import NoRepeatedNgrams
      >>> pairs = NoRepeatedNgrams(size=2, max_new_tokens=8)
      >>> state = pairs.begin(jnp.array([0]), jnp.array([[1, 3, 1, 2, 1]]))
      >>> pairs.steer(state, jnp.ones((1, 5))).tolist()
      [[1.0, 1.0, -inf, -inf, 1.0]]
    """

    # Tokens of an n-gram; static, as programs differ.
    size: int = dataclasses.field(metadata={"static": True})
    # Static, as the state's shape follows from it.
    max_new_tokens: int = dataclasses.field(metadata={"static": True})

    def begin(self, variants: jax.Array, prompts: jax.Array) -> jax.Array:
        """Return the newest tokens of each text, i32[N, T]."""
        del variants
        for name in ("size", "max_new_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(
                    f"NoRepeatedNgrams: {name} must be an int of 1 or more, got "
                    f"{value!r}"
                )
        most = prompts.shape[1] + self.max_new_tokens
        return find_newest(prompts, max(most, self.size))

    def steer(self, state: jax.Array, logits: jax.Array) -> jax.Array:
        """Forbid what would end an n-gram that the text has."""
        num_windows = state.shape[1] - self.size + 1
        # A window is an n-gram of the text if it lies behind the text's begin.
        is_again = state[:, :num_windows] >= 0
        for place in range(self.size - 1):
            of_window = state[:, place : place + num_windows]
            newest = state[:, num_windows + place]
            is_again &= of_window == newest[:, None]
        lasts = state[:, self.size - 1 :]
        return forbid(logits, jnp.where(is_again, lasts, -1))

    def advance(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
        """Add the token to the text."""
        return push(state, tokens)

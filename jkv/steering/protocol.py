"""What steers a text: any JAX code between a model's logits and the choice of a token.

It carries a state, of which each sequence has a row. The loops of decoding keep the
rows beside what they generate: a row is begun with its prompt, goes on with each token
that is chosen, and follows its sequence through samples, beams, preemption and guesses
that are taken back. Nothing asks the host.

Symbols: N sequences, P most prompt tokens, K rows of a call, V tokens in the
vocabulary.
"""

from typing import Any, Protocol

import jax

from jkv.status import UsageError


class Steering(Protocol):
    """What steers texts, a pytree: its arrays are arguments of the program.

    Make it a frozen dataclass that is registered as a pytree
    (`jax.tree_util.register_dataclass`), derive it from this class, and write `begin`,
    `steer` and `advance`. Loops call the methods inside jit, with rows in any order and
    any number of them, so that nothing in them may depend on other rows.

    Sequences that are not steered (variant -1) are given to the methods, too; what
    comes of it is not used.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, jkv
      >>> @jax.tree_util.register_dataclass
      ... @dataclasses.dataclass(frozen=True)
      ... class Ascending(jkv.Steering):
      ...     def begin(self, variants, prompts):
      ...         return jnp.max(prompts, axis=1)
      ...     def steer(self, state, logits):
      ...         token = jnp.arange(logits.shape[1])
      ...         return jnp.where(token[None] > state[:, None], logits, -jnp.inf)
      ...     def advance(self, state, tokens):
      ...         return jnp.maximum(state, tokens)
      >>> Ascending().steer(jnp.array([1]), jnp.ones((1, 4))).tolist()
      [[-inf, -inf, 1.0, 1.0]]
    """

    @property
    def num_variants(self) -> int:
        """Ways of steering that a sequence can choose from; one unless it says more."""
        return 1

    @property
    def num_end_tokens(self) -> int:
        """Tokens after each of which one state may have `ended`, at most.

        Beam search looks for so many more candidates.
        """
        return 1

    def begin(self, variants: jax.Array, prompts: jax.Array) -> Any:
        """Return the state of texts that begin, a pytree of arrays [N, ...].

        Args:
          variants: i32[N], which way each is steered; -1 for none, any state will do.
          prompts: i32[N, P], -1 after each one's end.
        """

    def steer(self, state: Any, logits: jax.Array) -> jax.Array:
        """Return other logits, f32[K, V]; a token at -inf is never chosen.

        They are what penalties, temperature and filters are applied to, and what a
        log-probability is of. A text for which none is left ends (NOTHING_ALLOWED).

        Args:
          state: K rows of it.
          logits: f32[K, V], the model's.
        """

    def advance(self, state: Any, tokens: jax.Array) -> Any:
        """Return the state after one more token of each text.

        Args:
          state: K rows of it.
          tokens: i32[K], what was chosen; -1 where nothing was: the row stays.
        """

    def ended(self, state: Any) -> jax.Array | None:
        """Return which texts have ended (STOP) with their newest token, bool[K].

        Args:
          state: K rows of it, after that token.

        Returns:
          None if this never ends a text, and then nothing is computed for it.
        """
        del state
        return None

    def forced(self, state: Any) -> jax.Array | None:
        """Return the only token that each text may have next, i32[K], -1 for several.

        Where `speculate` is given such tokens are guesses that cannot fail.

        Args:
          state: K rows of it.

        Returns:
          None if this does not tell, and then nothing is computed for it.
        """
        del state
        return None


METHODS = ("begin", "steer", "advance", "ended", "forced")


def check_steering(steering: object, taker: str) -> None:
    """Refuse what does not steer, in the name of what takes it."""
    lacks = [name for name in METHODS if not callable(getattr(steering, name, None))]
    if lacks or isinstance(steering, type):
        raise UsageError(
            f"{taker} must be a jkv.Steering, an object with the methods "
            f"{', '.join(METHODS)}; got {steering!r}"
        )


class EndsNothing(Steering):
    """What steers texts and ends none."""

    @property
    def num_end_tokens(self) -> int:
        """None: this ends no text."""
        return 0


class Unchanging(EndsNothing):
    """What steers texts alike, whatever their tokens are."""

    def advance(self, state: Any, tokens: jax.Array) -> Any:
        """Return the same: nothing depends on the text."""
        del tokens
        return state

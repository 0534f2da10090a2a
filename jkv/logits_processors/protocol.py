"""Protocol of logits processors: JAX code between a model's logits and token selection.

A processor has a state with a row for each sequence. Decoding loops store the rows: a
row starts from the prompt, is advanced by each chosen token, and follows its sequence
through samples, beams, preemption and rejected draft tokens, without communication with
the host.

Symbols: N sequences, P longest prompt, K rows of a call, V vocabulary size.
"""

from typing import Any, Protocol

import jax

from jkv.status import UsageError


class LogitsProcessor(Protocol):
    """Base class of logits processors, a pytree with its arrays as program arguments.

    Subclass it as a frozen dataclass registered as a pytree
    (`jax.tree_util.register_dataclass`), and implement `begin`, `process` and
    `advance`. Loops call the methods inside jit, with any number of rows in any order,
    so rows must not depend on each other.

    The methods also receive sequences without a variant (-1); their results are
    ignored.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, jkv
      >>> @jax.tree_util.register_dataclass
      ... @dataclasses.dataclass(frozen=True)
      ... class Ascending(jkv.LogitsProcessor):
      ...     def begin(self, variants, prompts):
      ...         return jnp.max(prompts, axis=1)
      ...     def process(self, state, logits):
      ...         token = jnp.arange(logits.shape[1])
      ...         return jnp.where(token[None] > state[:, None], logits, -jnp.inf)
      ...     def advance(self, state, tokens):
      ...         return jnp.maximum(state, tokens)
      >>> Ascending().process(jnp.array([1]), jnp.ones((1, 4))).tolist()
      [[-inf, -inf, 1.0, 1.0]]
    """

    @property
    def num_variants(self) -> int:
        """Number of variants that a sequence can select, one by default."""
        return 1

    @property
    def num_end_tokens(self) -> int:
        """Largest number of tokens after which `ended` may be true for one state.

        Beam search adds this number of candidates.
        """
        return 1

    def begin(self, variants: jax.Array, prompts: jax.Array) -> Any:
        """Return the initial state of sequences, a pytree of arrays [N, ...].

        Args:
          variants: i32[N], variant of each; -1 for none, with an arbitrary state.
          prompts: i32[N, P], padded with -1.
        """

    def process(self, state: Any, logits: jax.Array) -> jax.Array:
        """Return the processed logits, f32[K, V]; -inf masks a token.

        Penalties, temperature, filters and log-probabilities use the result. A sequence
        with all tokens masked ends (NOTHING_ALLOWED).

        Args:
          state: K rows.
          logits: f32[K, V], from the model.
        """

    def advance(self, state: Any, tokens: jax.Array) -> Any:
        """Return the state after one more token of each sequence.

        Args:
          state: K rows.
          tokens: i32[K], the chosen tokens; -1 for none, which keeps the row.
        """

    def ended(self, state: Any) -> jax.Array | None:
        """Return True for sequences that end (STOP) with their newest token, bool[K].

        Args:
          state: K rows, after that token.

        Returns:
          None if it never ends a sequence, which saves the computation.
        """
        del state
        return None

    def forced(self, state: Any) -> jax.Array | None:
        """Return the only allowed next token of each sequence, i32[K], -1 for several.

        With `speculate`, forced tokens are drafts that are always accepted.

        Args:
          state: K rows.

        Returns:
          None if it forces no tokens, which saves the computation.
        """
        del state
        return None


METHODS = ("begin", "process", "advance", "ended", "forced")


def check_logits_processor(logits_processor: object, taker: str) -> None:
    """Raise if an argument, named `taker`, does not implement the protocol."""
    lacks = [
        name for name in METHODS if not callable(getattr(logits_processor, name, None))
    ]
    if lacks or isinstance(logits_processor, type):
        raise UsageError(
            f"{taker} must be a jkv.LogitsProcessor, an object with the methods "
            f"{', '.join(METHODS)}; got {logits_processor!r}"
        )


class EndsNothing(LogitsProcessor):
    """Base class of logits processors that end no sequence."""

    @property
    def num_end_tokens(self) -> int:
        """0: it ends no sequence."""
        return 0


class Unchanging(EndsNothing):
    """Base class of logits processors that ignore the chosen tokens."""

    def advance(self, state: Any, tokens: jax.Array) -> Any:
        """Return the state unchanged."""
        del tokens
        return state

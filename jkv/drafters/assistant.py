"""Assistant: a drafter that attends to the target's keys and has none of its own.

Symbols: B requests, E width of the target's hidden states, V vocabulary size.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jkv.decoding import DraftStep
from jkv.decoding.model.drafter import WithoutLayers, check_sizes, static
from jkv.drafters.checks import check_function, check_layer_number
from jkv.state import Batch, Cache


class Reader(Protocol):
    """The layers of an assistant, as a function."""

    def __call__(
        self,
        params: Any,
        tokens: jax.Array,
        hidden: jax.Array,
        cache: Cache,
        batch: Batch,
        /,
    ) -> tuple[jax.Array, jax.Array]:
        """Compute a row of each sequence that attends to the target's cached tokens.

        Args:
          params: the weights, any pytree.
          tokens: i32[B], the newest token of each, drafted or not.
          hidden: f32[B, E], the hidden states before it: the target's, or the result of
            the row before.
          cache: with the target's keys; nothing is written.
          batch: of `jkv.peek`, all rows at the position after the cached tokens.

        Returns:
          f32[B, V], logits of the next token, and f32[B, E], hidden states.
        """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Assistant(WithoutLayers):
    """An assistant of Gemma 4: a small model on the target's own keys and values.

    All draft tokens have one position, that of the token after the cached ones; the
    hidden states carry the draft tokens.

    Attributes:
      reader: computes a row of each sequence (`jkv.drafters.Reader`); static.
      params: its weights.
      last: the number of the target's layers, which stands for the output of its final
        norm; static.
      num_tokens: draft tokens of a sequence in a step; static.
      cost: time of a step with drafting, relative to a plain step; static.

    Raises:
      UsageError: for a number out of its range, or a field of another type.
    """

    reader: Reader = dataclasses.field(metadata={"static": True})
    params: Any
    last: int = dataclasses.field(metadata={"static": True})
    num_tokens: int = static(4)
    cost: float = static(1.5)

    def __post_init__(self) -> None:
        check_sizes(self.num_tokens, self.cost)
        check_function("reader", self.reader)
        check_layer_number("last", self.last)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The output of the target's final norm."""
        return (self.last,)

    def draft(
        self, cache: Cache, step: DraftStep
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Draft tokens one by one, all from the same cached tokens."""
        past = step.past

        def compute(
            hidden: jax.Array, _: jax.Array, tokens: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            logits, after = self.reader(self.params, tokens, hidden, cache, past)
            return after.astype(jnp.float32), logits

        step.decode(compute, step.previous)
        return cache, *step.drafted

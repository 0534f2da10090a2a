"""Composition of logits processors, and mapping of their variant numbers.

Processors with different variants can be chained: a table maps each variant of the
chain to a variant of each processor, or to none.

Symbols: N sequences, K rows, M variants.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import explains_arguments
from jkv.logits_processors.protocol import LogitsProcessor, check_logits_processor
from jkv.logits_processors.tables import check_integers
from jkv.status import UsageError


@explains_arguments
def chain(*processors: LogitsProcessor) -> LogitsProcessor:
    """Return a logits processor that applies several in order.

    Each processes the logits of the previous one. A sequence ends if any of them ends
    it. Its forced token is the one of the first that forces a token, or -1 if two force
    different ones: then all tokens are masked.

    A token forced by one link may be masked by another. `forced` returns it anyway: all
    tokens are masked then, so a draft of it is rejected, and the sequence ends as
    without speculation (NOTHING_ALLOWED).

    Links with one variant apply it to all sequences; the others must have M variants
    each, and a sequence uses the same number for all. `renumber` changes the numbers.

    Args:
      processors: one or more, in order. Their states are stored side by side.

    Returns:
      A `LogitsProcessor` with M variants, or one.

    Raises:
      ValueError: without arguments, for an argument that is not a `LogitsProcessor`,
        and for different numbers of variants.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.logits_processors import BannedSequences, MinimumLength, chain
      >>> both = chain(
      ...     BannedSequences(jnp.array([[1]])),
      ...     MinimumLength(jnp.array([2]), min_new_tokens=jnp.array([0, 5])),
      ... )
      >>> state = both.begin(jnp.array([0, 1]), jnp.array([[3], [3]]))
      >>> both.process(state, jnp.ones((2, 4))).tolist()
      [[1.0, -inf, 1.0, 1.0], [1.0, -inf, -inf, 1.0]]
    """
    if not processors:
        raise UsageError("chain requires at least one jkv.LogitsProcessor, got none")
    for each in processors:
        check_logits_processor(each, "each of a chain")
    counts = [each.num_variants for each in processors]
    if len({count for count in counts if count != 1}) > 1:
        raise UsageError(
            f"processors must have the same number of variants, or one, got {counts}; "
            f"use jkv.logits_processors.renumber"
        )
    return Chain(processors)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Chain(LogitsProcessor):
    """Result of `chain`."""

    links: tuple[LogitsProcessor, ...]

    @property
    def num_variants(self) -> int:
        """Number of variants of the links that have several, or 1."""
        counts = [link.num_variants for link in self.links]
        return next((count for count in counts if count != 1), 1)

    @property
    def num_end_tokens(self) -> int:
        return sum(link.num_end_tokens for link in self.links)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> tuple[Any, ...]:
        """Return the states of the links; links with one variant use variant 0."""
        only = jnp.minimum(variants, 0)
        return tuple(
            link.begin(variants if link.num_variants != 1 else only, prompts)
            for link in self.links
        )

    def process(self, state: tuple[Any, ...], logits: jax.Array) -> jax.Array:
        for link, rows in zip(self.links, state, strict=True):
            logits = link.process(rows, logits)
        return logits

    def advance(self, state: tuple[Any, ...], tokens: jax.Array) -> tuple[Any, ...]:
        pairs = zip(self.links, state, strict=True)
        return tuple(link.advance(rows, tokens) for link, rows in pairs)

    def ended(self, state: tuple[Any, ...]) -> jax.Array | None:
        """Return True for sequences ended by one of the links, bool[K]."""
        ended = None
        for link, rows in zip(self.links, state, strict=True):
            more = link.ended(rows)
            if more is not None:
                ended = more if ended is None else ended | more
        return ended

    def forced(self, state: tuple[Any, ...]) -> jax.Array | None:
        """Return the first forced token, i32[K], -1 for none or if two differ."""
        pairs = zip(self.links, state, strict=True)
        results = [link.forced(rows) for link, rows in pairs]
        each = [tokens for tokens in results if tokens is not None]
        if not each:
            return None
        token = each[0]
        for other in each[1:]:
            token = jnp.where(token < 0, other, token)
        for other in each:
            token = jnp.where((other >= 0) & (other != token), -1, token)
        return token


@explains_arguments
def renumber(processor: LogitsProcessor, numbers: jax.Array) -> LogitsProcessor:
    """Return a logits processor with its variants renumbered.

    Args:
      processor: the logits processor.
      numbers: i32[M], the variant of `processor` for each new variant, -1 for none,
        which leaves the logits unchanged. Its values may change without recompilation.

    Returns:
      A `LogitsProcessor` with M variants.

    Raises:
      ValueError: for numbers other than i32[M] or, outside jit, invalid variants.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.logits_processors import MinimumLength, TokenBias, chain, renumber
      >>> least = MinimumLength(jnp.array([2]), min_new_tokens=jnp.array([5, 9]))
      >>> bias = TokenBias(jnp.array([1]), jnp.array([3.0]))
      >>> both = chain(
      ...     renumber(least, jnp.array([-1, 1, 0])),
      ...     renumber(bias, jnp.array([0, -1, 0])),
      ... )
      >>> state = both.begin(jnp.array([0, 1, 2]), jnp.array([[3], [3], [3]]))
      >>> both.process(state, jnp.ones((3, 3))).tolist()
      [[1.0, 4.0, 1.0], [1.0, 1.0, -inf], [1.0, 4.0, -inf]]
    """
    array = check_integers("renumber: numbers", numbers, "M")
    if not isinstance(array, jax.core.Tracer):
        found, most = np.asarray(array), processor.num_variants
        wrong = found[(found < -1) | (found >= most)]
        if wrong.size:
            raise UsageError(
                f"renumber: numbers must be variants of {type(processor).__name__} "
                f"from 0 to {most - 1}, or -1 for none, got {int(wrong[0])}"
            )
    return Renumbered(processor, numbers)


class _RenumberedRows(NamedTuple):
    """State of N sequences."""

    inner: Any  # a pytree of arrays [N, ...]
    applies: jax.Array  # bool[N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Renumbered(LogitsProcessor):
    """Result of `renumber`."""

    processor: LogitsProcessor
    numbers: jax.Array  # i32[M]

    @property
    def num_variants(self) -> int:
        """Number of variants, M."""
        return self.numbers.shape[-1]

    @property
    def num_end_tokens(self) -> int:
        return self.processor.num_end_tokens

    def begin(self, variants: jax.Array, prompts: jax.Array) -> _RenumberedRows:
        """Return the state with variants mapped by `numbers`."""
        numbers = jnp.asarray(self.numbers, jnp.int32)
        meant = jnp.where(variants < 0, -1, numbers[jnp.maximum(variants, 0)])
        return _RenumberedRows(self.processor.begin(meant, prompts), meant >= 0)

    def process(self, state: _RenumberedRows, logits: jax.Array) -> jax.Array:
        processed = self.processor.process(state.inner, logits)
        return jnp.where(state.applies[:, None], processed, logits)

    def advance(self, state: _RenumberedRows, tokens: jax.Array) -> _RenumberedRows:
        tokens = jnp.where(state.applies, tokens, -1)
        return state._replace(inner=self.processor.advance(state.inner, tokens))

    def ended(self, state: _RenumberedRows) -> jax.Array | None:
        """Return True for ended sequences, bool[K]."""
        ended = self.processor.ended(state.inner)
        return None if ended is None else ended & state.applies

    def forced(self, state: _RenumberedRows) -> jax.Array | None:
        """Return the forced tokens, i32[K], -1 for none."""
        forced = self.processor.forced(state.inner)
        return None if forced is None else jnp.where(state.applies, forced, -1)

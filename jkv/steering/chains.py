"""Several things that steer one text, and the variants of one under other numbers.

So things with different variants can be chained, and a row of a table can say for each
of them which variant a text takes, or none.

Symbols: N texts, K rows, M variants.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import explains_arguments
from jkv.status import UsageError
from jkv.steering.protocol import Steering, check_steering
from jkv.steering.tables import check_integers


@explains_arguments
def chain(*steerings: Steering) -> Steering:
    """Return what steers a text by several things at once.

    Each steers the logits that the one before it left. A text has ended where one of
    them says so. A forced token is that of the first that forces one, or -1 where
    another forces a different one: nothing is allowed then.

    What one link forces another may forbid. `forced` tells such a token all the same:
    nothing is allowed then, so a guess of it fails, and the text ends as it does
    without guesses (NOTHING_ALLOWED).

    Those with one variant steer all texts alike; the others must have M variants each,
    and a text takes the same of all. `renumber` lets it take another of each.

    Args:
      steerings: one or more, in order. Their states are kept side by side.

    Returns:
      A `Steering` with M variants, or one.

    Raises:
      ValueError: for none, for something that does not steer, and for numbers of
        variants that differ.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import BannedTexts, MinimumLength, chain
      >>> both = chain(
      ...     BannedTexts(jnp.array([[1]])),
      ...     MinimumLength(jnp.array([2]), min_new_tokens=jnp.array([0, 5])),
      ... )
      >>> state = both.begin(jnp.array([0, 1]), jnp.array([[3], [3]]))
      >>> both.steer(state, jnp.ones((2, 4))).tolist()
      [[1.0, -inf, 1.0, 1.0], [1.0, -inf, -inf, 1.0]]
    """
    if not steerings:
        raise UsageError("chain needs one jkv.Steering at least")
    for each in steerings:
        check_steering(each, "each of a chain")
    counts = [each.num_variants for each in steerings]
    if len({count for count in counts if count != 1}) > 1:
        raise UsageError(
            f"steerings of a chain must have equally many variants, or one; got "
            f"{counts}"
        )
    return Chain(steerings)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Chain(Steering):
    """What `chain` returns."""

    links: tuple[Steering, ...]

    @property
    def num_variants(self) -> int:
        """Those of the links that have several, or one."""
        counts = [link.num_variants for link in self.links]
        return next((count for count in counts if count != 1), 1)

    @property
    def num_end_tokens(self) -> int:
        return sum(link.num_end_tokens for link in self.links)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> tuple[Any, ...]:
        """Return the states of the links; of one with one variant each text has it."""
        only = jnp.minimum(variants, 0)
        return tuple(
            link.begin(variants if link.num_variants != 1 else only, prompts)
            for link in self.links
        )

    def steer(self, state: tuple[Any, ...], logits: jax.Array) -> jax.Array:
        for link, rows in zip(self.links, state, strict=True):
            logits = link.steer(rows, logits)
        return logits

    def advance(self, state: tuple[Any, ...], tokens: jax.Array) -> tuple[Any, ...]:
        pairs = zip(self.links, state, strict=True)
        return tuple(link.advance(rows, tokens) for link, rows in pairs)

    def ended(self, state: tuple[Any, ...]) -> jax.Array | None:
        """Return which texts have ended by one of the links, bool[K]."""
        ended = None
        for link, rows in zip(self.links, state, strict=True):
            more = link.ended(rows)
            if more is not None:
                ended = more if ended is None else ended | more
        return ended

    def forced(self, state: tuple[Any, ...]) -> jax.Array | None:
        """Return what the first forces, i32[K], -1 for none or where two differ."""
        pairs = zip(self.links, state, strict=True)
        told = [link.forced(rows) for link, rows in pairs]
        each = [tokens for tokens in told if tokens is not None]
        if not each:
            return None
        token = each[0]
        for other in each[1:]:
            token = jnp.where(token < 0, other, token)
        for other in each:
            token = jnp.where((other >= 0) & (other != token), -1, token)
        return token


@explains_arguments
def renumber(steering: Steering, numbers: jax.Array) -> Steering:
    """Return what steers as another does, with variants of its own.

    Args:
      steering: what steers.
      numbers: i32[M], which variant of it each variant takes, -1 for none: then a text
        is not steered by it. They are an array like others, which may be exchanged
        without compiling.

    Returns:
      A `Steering` with M variants.

    Raises:
      ValueError: for numbers that are no i32[M], or, outside of jit, no variants.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import MinimumLength, TokenBias, chain, renumber
      >>> least = MinimumLength(jnp.array([2]), min_new_tokens=jnp.array([5, 9]))
      >>> bias = TokenBias(jnp.array([1]), jnp.array([3.0]))
      >>> both = chain(
      ...     renumber(least, jnp.array([-1, 1, 0])),
      ...     renumber(bias, jnp.array([0, -1, 0])),
      ... )
      >>> state = both.begin(jnp.array([0, 1, 2]), jnp.array([[3], [3], [3]]))
      >>> both.steer(state, jnp.ones((3, 3))).tolist()
      [[1.0, 4.0, 1.0], [1.0, 1.0, -inf], [1.0, 4.0, -inf]]
    """
    array = check_integers("renumber: numbers", numbers, "M")
    if not isinstance(array, jax.core.Tracer):
        found, most = np.asarray(array), steering.num_variants
        wrong = found[(found < -1) | (found >= most)]
        if wrong.size:
            raise UsageError(
                f"renumber: variants of {type(steering).__name__} are from 0 to "
                f"{most - 1}, or -1 for none; got {int(wrong[0])}"
            )
    return Renumbered(steering, numbers)


class _RenumberedRows(NamedTuple):
    """What is known of N texts."""

    inner: Any  # a pytree of arrays [N, ...]
    is_steered: jax.Array  # bool[N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Renumbered(Steering):
    """What `renumber` returns."""

    steering: Steering
    numbers: jax.Array  # i32[M]

    @property
    def num_variants(self) -> int:
        """M."""
        return self.numbers.shape[-1]

    @property
    def num_end_tokens(self) -> int:
        return self.steering.num_end_tokens

    def begin(self, variants: jax.Array, prompts: jax.Array) -> _RenumberedRows:
        """Return the rows of the variants that are meant."""
        numbers = jnp.asarray(self.numbers, jnp.int32)
        meant = jnp.where(variants < 0, -1, numbers[jnp.maximum(variants, 0)])
        return _RenumberedRows(self.steering.begin(meant, prompts), meant >= 0)

    def steer(self, state: _RenumberedRows, logits: jax.Array) -> jax.Array:
        steered = self.steering.steer(state.inner, logits)
        return jnp.where(state.is_steered[:, None], steered, logits)

    def advance(self, state: _RenumberedRows, tokens: jax.Array) -> _RenumberedRows:
        tokens = jnp.where(state.is_steered, tokens, -1)
        return state._replace(inner=self.steering.advance(state.inner, tokens))

    def ended(self, state: _RenumberedRows) -> jax.Array | None:
        """Return which of them have ended, bool[K]."""
        ended = self.steering.ended(state.inner)
        return None if ended is None else ended & state.is_steered

    def forced(self, state: _RenumberedRows) -> jax.Array | None:
        """Return what is forced on them, i32[K], -1 for none."""
        forced = self.steering.forced(state.inner)
        return None if forced is None else jnp.where(state.is_steered, forced, -1)

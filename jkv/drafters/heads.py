"""Eagle3 and MultiToken: heads that read the target's hidden states.

A row of such a head combines the embedding of a token and a hidden state of the token
before it. The first hidden states are the target's; behind the first draft token come
the head's own. Published heads were trained without a row for a sequence's first token,
which has no token before it: `hide_first` keeps its key from attention.

Symbols: B requests, R rows, A width of the auxiliary hidden states, E of the head's
own, V vocabulary size.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jkv.config.cache_config import CacheConfig
from jkv.decoding import DraftStep
from jkv.decoding.model.drafter import (
    check_aux_layers,
    check_sizes,
    find_previous,
    own_layers,
    rejoin,
    static,
)
from jkv.drafters.checks import check_config, check_function, check_layer_number
from jkv.state import Batch, Cache
from jkv.verbs.attending import plan_attention

# Components that `hide_first` adds to keys and queries: as many as keep the head dim a
# multiple of 8, which kernels need.
HIDDEN_DIM = 8

# Product of a query with a hidden key, before it is scaled.
_HIDDEN = -1e4


class Head(Protocol):
    """The layers of a drafter, as a function."""

    def __call__(
        self,
        params: Any,
        tokens: jax.Array,
        hidden: jax.Array,
        cache: Cache,
        batch: Batch,
        /,
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Compute rows of a head, and write their keys in its layers, from 0 on.

        Args:
          params: the weights, any pytree.
          tokens: i32[R], the token that each row consumes.
          hidden: f32[R, E], hidden states of the token before it.
          cache: with the head's layers only.
          batch: the rows.

        Returns:
          f32[R, V], logits of the token after each row; f32[R, E], the row's own hidden
          states; and the cache.
        """


class _HiddenStates:
    """Base class of `Eagle3` and `MultiToken`: rows one by one, on hidden states."""

    head: Any
    params: Any
    config: CacheConfig
    num_tokens: int

    @property
    def groups(self) -> tuple[CacheConfig, ...]:
        """The sizes of its layers."""
        return (self.config,)

    def _project(self, hidden: jax.Array) -> jax.Array:
        """Return the head's inputs, f32[..., E], from the target's, f32[..., A]."""
        return hidden

    def update(
        self,
        cache: Cache,
        batch: Batch,
        tokens: jax.Array,
        hidden: jax.Array,
        previous: jax.Array,
    ) -> Cache:
        """Write the head's keys of accepted rows, from the target's hidden states."""
        before = find_previous(batch, self._project(hidden), self._project(previous))
        _, _, cache = self._compute(cache, batch, tokens, before)
        return cache

    def draft(
        self, cache: Cache, step: DraftStep
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Draft tokens one by one, each row on the hidden states of the last."""
        Carry = tuple[Cache, jax.Array]

        def compute(
            carry: Carry, index: jax.Array, tokens: jax.Array
        ) -> tuple[Carry, jax.Array]:
            cache, hidden = carry
            row = plan_attention(cache, step.batch.row(index))
            logits, hidden, cache = self._compute(cache, row, tokens, hidden)
            return (cache, hidden), logits

        start = cache, self._project(step.previous)
        cache, _ = step.decode(compute, start)
        return cache, *step.drafted

    def _compute(
        self, cache: Cache, batch: Batch, tokens: jax.Array, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Run the head on its own layers; checks nothing but its results' shapes."""
        drafter: Any = self
        own = own_layers(cache, drafter)
        logits, after, own = self.head(self.params, tokens, hidden, own, batch)
        return logits, after.astype(hidden.dtype), rejoin(own, cache)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Eagle3(_HiddenStates):
    """EAGLE-3: one layer on hidden states of three layers of the target.

    `project` joins the auxiliary hidden states once; draft tokens after the first
    continue from the head's own (Li et al., "EAGLE-3: Scaling up Inference Acceleration
    of Large Language Models via Training-Time Test", 2025).

    Attributes:
      head: computes the layer (`jkv.drafters.Head`); static. A head with a draft
        vocabulary returns -inf for the target's other tokens.
      project: returns f32[..., E] given the weights and f32[..., A]; static.
      params: the weights, of both.
      config: the sizes of the layer in the cache; static.
      aux_layers: the target's layers, by their inputs; static.
      num_tokens: draft tokens of a sequence in a step; static.
      cost: time of a step with drafting, relative to a plain step; static.

    Raises:
      UsageError: for a number out of its range, or a field of another type.
    """

    head: Head = dataclasses.field(metadata={"static": True})
    project: Any = dataclasses.field(metadata={"static": True})
    params: Any
    config: CacheConfig = dataclasses.field(metadata={"static": True})
    aux_layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    num_tokens: int = static(4)
    cost: float = static(1.5)

    def __post_init__(self) -> None:
        check_sizes(self.num_tokens, self.cost)
        check_function("head", self.head)
        check_function("project", self.project)
        check_config(self.config)
        check_aux_layers(self.aux_layers)

    def _project(self, hidden: jax.Array) -> jax.Array:
        projected: jax.Array = self.project(self.params, hidden)
        return projected


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MultiToken(_HiddenStates):
    """Multi-token prediction: the MTP layer that a checkpoint was trained with.

    It reads the target's last hidden states. Draft tokens after the first come from the
    same layer, on its own hidden states (DeepSeek-AI, "DeepSeek-V3 Technical Report",
    2024; GLM 4.5 and Qwen3-Next have one, too). Checkpoints with several such layers
    are used with their first one.

    Attributes:
      head: computes the layer (`jkv.drafters.Head`); static.
      params: its weights.
      config: the sizes of the layer in the cache; static.
      last: the number of the target's layers, which stands for the output of its final
        norm; static.
      num_tokens: draft tokens of a sequence in a step; static.
      cost: time of a step with drafting, relative to a plain step; static.

    Raises:
      UsageError: for a number out of its range, or a field of another type.
    """

    head: Head = dataclasses.field(metadata={"static": True})
    params: Any
    config: CacheConfig = dataclasses.field(metadata={"static": True})
    last: int = dataclasses.field(metadata={"static": True})
    num_tokens: int = static(2)
    cost: float = static(1.5)

    def __post_init__(self) -> None:
        check_sizes(self.num_tokens, self.cost)
        check_function("head", self.head)
        check_config(self.config)
        check_layer_number("last", self.last)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The output of the target's final norm."""
        return (self.last,)


def hide_first(
    keys: jax.Array, queries: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Extend keys and queries so that no row attends to a sequence's first token.

    Args:
      keys: [R, K, D].
      queries: [R, H, D].
      positions: i32[R], `batch.positions`.

    Returns:
      Keys [R, K, D + 8] and queries [R, H, D + 8]; the cache needs this `head_dim`, and
      `attend` a `scale` of its own. The first row itself attends to its key only.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.drafters import hide_first
      >>> rows = jnp.ones((2, 1, 8))
      >>> keys, queries = hide_first(rows, rows, jnp.array([0, 1]))
      >>> jnp.sum(keys * queries, axis=-1)[:, 0].tolist()
      [-9992.0, 8.0]
    """

    def extend(rows: jax.Array, first: jax.Array) -> jax.Array:
        shape = (*rows.shape[:2], HIDDEN_DIM)
        more = jnp.zeros(shape, rows.dtype)
        more = more.at[..., 0].set(first.astype(rows.dtype)[:, None])
        return jnp.concatenate([rows, more], axis=-1)

    is_first = jnp.where(positions == 0, _HIDDEN, 0.0)
    return extend(keys, is_first), extend(queries, jnp.ones(positions.shape))

"""Drafters: the interface, their layers in the target's cache, and their updates.

A drafter proposes draft tokens, which the target model verifies. Its layers are groups
of the target's cache, numbered after the target's, so that `fork`, prefix caching and
all other verbs carry both. A drafter's row is stored in the slot of the token that it
consumes: slot i holds token i and the target's hidden state of row i - 1. So no key
depends on a later token, and tokens alone identify a block.

Symbols: B requests, R rows, A width of the auxiliary hidden states, k draft tokens.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jkv.config.cache_config import CacheConfig
from jkv.config.grouped_config import GroupedConfig, LayerGroups, as_grouped
from jkv.config.state_config import StateConfig
from jkv.operations import gather, scatter
from jkv.state import Batch, BlockStorage, Cache, StateStorage
from jkv.status import UsageError

Config = CacheConfig | StateConfig | GroupedConfig
LayersOfGroups = tuple[tuple[int, ...], ...]


def static(default: Any) -> Any:
    """Return a static field of a drafter's dataclass, with a default."""
    return dataclasses.field(default=default, metadata={"static": True})


class Drafter(Protocol):
    """The interface of drafters: a pytree with static sizes and two pure methods.

    Its arrays, the weights, are arguments of the program. A drafter may have
    `layer_groups`, the group of each of its layers, as `GroupedConfig` has; without it
    the layers of each group follow each other. `cost` is the time of a step with draft
    tokens, relative to a plain step.
    """

    @property
    def num_tokens(self) -> int:
        """Most draft tokens of a sequence in a step, k."""

    @property
    def cost(self) -> float:
        """Time of a step with draft tokens, relative to a plain step."""

    @property
    def groups(self) -> tuple[CacheConfig | StateConfig, ...]:
        """The sizes of its own layers in the cache; () for none."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose hidden states it needs; () for none.

        Layer i stands for the input of layer i, 0 for the embeddings, and the number of
        layers for the output of the final norm.
        """

    def update(
        self,
        cache: Cache,
        batch: Batch,
        tokens: jax.Array,
        hidden: jax.Array,
        previous: jax.Array,
    ) -> Cache:
        """Write the drafter's keys of accepted rows; called behind the target.

        Args:
          cache: after the target has written the rows.
          batch: the step, of R rows.
          tokens: i32[R].
          hidden: f32[R, A], the auxiliary hidden states of each row, side by side.
          previous: f32[B, A], of the row before each request's first one; zeros at the
            start of a sequence.
        """

    def draft(self, cache: Cache, step: Any) -> tuple[Cache, jax.Array, jax.Array]:
        """Return the cache, draft tokens, i32[B, k], and their counts, i32[B].

        After `step.choose` or `step.decode` return `step.drafted`: the tokens drawn and
        their counts stand. `choose(keep=)` ends the draft tokens of a sequence earlier.

        Args:
          cache: with the rows of the step appended, if the drafter has groups.
          step: a `DraftStep`.
        """


class WithoutLayers:
    """Base class of drafters that have no layers in the cache."""

    groups = ()

    def update(
        self,
        cache: Cache,
        batch: Batch,
        tokens: jax.Array,
        hidden: jax.Array,
        previous: jax.Array,
    ) -> Cache:
        """Return the cache unchanged."""
        del batch, tokens, hidden, previous
        return cache


METHODS = "update", "draft"
FIELDS = "num_tokens", "cost", "groups", "aux_layers"


def check_drafter(drafter: Any) -> None:
    """Refuse another value than a drafter, and invalid sizes."""
    missing = [name for name in (*FIELDS, *METHODS) if not hasattr(drafter, name)]
    if isinstance(drafter, type) or missing:
        lacks = f", which lacks {', '.join(missing)}" if missing else ""
        raise UsageError(
            f"speculate must be a drafter, such as PromptLookup(num_tokens=7), a "
            f"DraftModel or one of jkv.drafters, or None; got {drafter!r:.80}{lacks}"
        )
    check_sizes(drafter.num_tokens, drafter.cost)
    check_aux_layers(drafter.aux_layers)
    kinds, groups = CacheConfig | StateConfig, drafter.groups
    if not isinstance(groups, tuple) or any(not isinstance(i, kinds) for i in groups):
        raise UsageError(
            f"groups must be a tuple of jkv.CacheConfig and jkv.StateConfig, the sizes "
            f"of the drafter's own layers, () for none, got {groups!r:.80}"
        )


def check_aux_layers(numbers: Any) -> None:
    """Refuse another value than a tuple of layer numbers."""
    is_tuple = isinstance(numbers, tuple)
    if not is_tuple or any(type(i) is not int or i < 0 for i in numbers):
        raise UsageError(
            f"aux_layers must be a tuple of layer numbers, ints from 0 to the number "
            f"of layers of the target, got {numbers!r}"
        )


def check_returned(drafter: Drafter, answer: Any) -> Cache:
    """Return the cache of `Drafter.update`; refuse another value."""
    if not isinstance(answer, Cache):
        raise UsageError(
            f"update of {type(drafter).__name__} must return the cache, as its last "
            f"write returned it, got {type(answer).__name__}"
        )
    return answer


def check_draft(drafter: Drafter, answer: Any) -> None:
    """Refuse another result of `Drafter.draft` than a cache and two arrays."""
    if isinstance(answer, tuple) and len(answer) == 3 and isinstance(answer[0], Cache):
        return
    found = type(answer).__name__
    if isinstance(answer, tuple):
        found = f"({', '.join(type(part).__name__ for part in answer)})"
    raise UsageError(
        f"draft of {type(drafter).__name__} must return (cache, tokens, counts), the "
        f"tokens i32[B, k] and the counts i32[B], got {found}"
    )


def check_sizes(num_tokens: int, cost: float) -> None:
    """Refuse a number of draft tokens or a cost that never pays."""
    if type(num_tokens) is not int or num_tokens < 1:
        raise UsageError(f"num_tokens must be an int of at least 1, got {num_tokens!r}")
    if not isinstance(cost, int | float):
        raise UsageError(
            f"cost must be a static number, got {cost!r}; pass float(cost)"
        )
    if not 1 <= cost < num_tokens + 1:
        raise UsageError(
            f"cost must be from 1 to below num_tokens + 1, the most tokens of a step, "
            f"got {cost} for {num_tokens} tokens"
        )


def with_drafter(config: Config, drafter: Drafter) -> GroupedConfig:
    """Return a target's configuration with the layers of a drafter.

    The drafter's groups come after the target's, and its layers are numbered after the
    target's. A request is then served in all groups or in none. Loops without the
    drafter (`beam_search`, or no `speculate`) do not write its layers: the outputs are
    right, but later drafts for these tokens and their prefix cache hits may be worse.

    Args:
      config: the target's sizes.
      drafter: a drafter, with groups of equal `max_sequences`, `max_context_length` and
        `block_size`. Their `prefix_caching` and `keep_classes` are the target's.

    Returns:
      The configuration for `jkv.init`; the target's own for a drafter without groups.

    Raises:
      UsageError: for a drafter with groups of other sizes in tokens.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(num_layers=2)
      >>> drafter = jkv.DraftModel(
      ...     model=lambda *args: None, params=None, config=jkv.CacheConfig.toy())
      >>> jkv.with_drafter(config, drafter).layer_groups
      (0, 0, 1)
    """
    if not isinstance(config, CacheConfig | StateConfig | GroupedConfig):
        raise UsageError(
            f"config must be a jkv.CacheConfig or jkv.GroupedConfig, the sizes of the "
            f"target's cache, got {config!r:.60}"
        )
    target = as_grouped(config)
    check_drafter(drafter)
    if not drafter.groups:
        return target
    for group in drafter.groups:
        for name in ("max_sequences", "max_context_length", "block_size"):
            own, wanted = getattr(group, name), getattr(target, name)
            if own != wanted:
                raise UsageError(
                    f"{name} of the drafter's groups must be the target's {wanted}, as "
                    f"both share the sequences, got {own}; pass {name}={wanted}"
                )
    num_groups = len(target.groups)
    # A tuple of one group is the same as its index.
    layers: tuple[LayerGroups, ...] = tuple(
        groups[0] if len(groups) == 1 else groups
        for groups in layers_of(drafter, num_groups)
    )
    return GroupedConfig(
        groups=tuple(map(_without_index, (*target.groups, *drafter.groups))),
        layer_groups=(*target.layer_groups, *layers),
        prefix_caching=target.prefix_caching,
        keep_classes=target.keep_classes,
    )


def _without_index(group: CacheConfig | StateConfig) -> CacheConfig | StateConfig:
    """Return a group without the fields that belong to the whole cache."""
    if isinstance(group, StateConfig):
        return group
    return dataclasses.replace(group, prefix_caching=False, keep_classes=1)


def layers_of(drafter: Drafter, first_group: int) -> LayersOfGroups:
    """Return the groups of each of a drafter's layers, numbered from `first_group`."""
    own = getattr(drafter, "layer_groups", None)
    if own is None:
        groups = enumerate(drafter.groups)
        own = [(i,) for i, group in groups for _ in range(group.num_layers)]
    each = [layer if isinstance(layer, tuple) else (layer,) for layer in own]
    return tuple(tuple(first_group + i for i in layer) for layer in each)


class SharedLayers(NamedTuple):
    """The layers of a cache: the target's, and the drafter's."""

    target: LayersOfGroups
    drafter: LayersOfGroups

    @classmethod
    def of(cls, cache: Cache, drafter: Drafter) -> "SharedLayers":
        """Divide the layers of a cache; refuse one without the drafter's groups."""
        first = len(cache.storage) - len(drafter.groups)
        own = layers_of(drafter, first)
        count = len(cache.layer_groups) - len(own)
        found = cls(cache.layer_groups[:count], cache.layer_groups[count:])
        if not drafter.groups:
            return found
        of_target = frozenset[int]().union(*found.target)
        fits = first > 0 and count > 0 and found.drafter == own
        fits = fits and not any(i >= first for i in of_target)
        for storage, group in zip(cache.storage[first:], drafter.groups, strict=False):
            fits = fits and _is_alike(storage, group)
        if not fits:
            raise UsageError(
                f"the cache must have the layers of {type(drafter).__name__} after the "
                f"target's; create it with jkv.init(jkv.with_drafter(config, drafter))"
            )
        return found


def _is_alike(storage: Any, group: CacheConfig | StateConfig) -> bool:
    """Return True if a group of a cache has the sizes of a configuration."""
    if isinstance(group, StateConfig):
        return isinstance(storage, StateStorage)
    sizes = group.num_kv_heads, group.head_dim
    return isinstance(storage, BlockStorage) and sizes == (
        storage.num_kv_heads,
        storage.head_dim,
    )


def own_layers(cache: Cache, drafter: Drafter) -> Cache:
    """Return the cache with a drafter's layers only, numbered from 0.

    For drafters with a model of their own; `rejoin` turns the result into the whole
    cache again.
    """
    return cache.with_layers(SharedLayers.of(cache, drafter).drafter)


def rejoin(own: Cache, whole: Cache) -> Cache:
    """Return a cache of `own_layers`, changed since, with all layers of `whole`."""
    return own.with_layers(whole.layer_groups)


class Follower(NamedTuple):
    """A drafter behind the calls of a model, and the hidden states before a call."""

    drafter: Drafter
    previous: jax.Array  # f32[B, A], of the row before each request's first one
    # bool[B], the drafter's keys of a request's first row are stored already
    is_stored: jax.Array

    def update(
        self, cache: Cache, batch: Batch, tokens: jax.Array, hidden: jax.Array
    ) -> Cache:
        """Update the drafter with the rows of a step, and return the cache."""
        drafter = self.drafter
        if drafter.groups and drafter.aux_layers:
            first = jnp.where(
                self.is_stored & (batch.query_lengths > 0),
                batch.query_starts,
                batch.num_rows,
            )
            is_first = jnp.zeros((batch.num_rows,), bool)
            batch = batch.without_slots(is_first.at[first].set(True, mode="drop"))
        if drafter.groups:
            batch = dataclasses.replace(batch, is_draft=True)
        after = drafter.update(cache, batch, tokens, hidden, self.previous)
        return check_returned(drafter, after)

    def read_last(self, batch: Batch, hidden: jax.Array) -> jax.Array:
        """Return the hidden states of each request's last row, f32[B, A]."""
        last = batch.query_starts + batch.query_lengths - 1
        has_rows = (batch.query_lengths > 0)[:, None]
        return jnp.where(has_rows, gather(hidden, last), self.previous)


def find_previous(batch: Batch, hidden: jax.Array, previous: jax.Array) -> jax.Array:
    """Return the hidden states of the row before each row, f32[R, A].

    For `Drafter.update`, whose rows need the state before the token they consume.

    Args:
      batch: the step, of R rows.
      hidden: f32[R, A], of each row.
      previous: f32[B, A], of the row before each request's first one.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0, 0])
      >>> _, batch = jkv.append(cache, opened.seq_ids, [2, 1], capacity=3)
      >>> hidden, before = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[7.0], [8.0]])
      >>> jkv.drafters.find_previous(batch, hidden, before)[:, 0].tolist()
      [7.0, 1.0, 8.0]
    """
    moved = jnp.roll(hidden, 1, axis=0)
    first = jnp.where(batch.query_lengths > 0, batch.query_starts, batch.num_rows)
    return scatter(moved, first, previous)

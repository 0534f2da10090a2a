"""Block: a drafter that computes all draft tokens in one pass (DFlash, DSpark).

Symbols: B requests, R rows, A width of the auxiliary hidden states, k draft tokens, V
vocabulary size.
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
    own_layers,
    rejoin,
    static,
)
from jkv.drafters.checks import check_config, check_function
from jkv.masks import SpanMask
from jkv.metadata.requests import check_static
from jkv.operations import find_owners, gather
from jkv.state import Batch, Cache
from jkv.verbs.attending import plan_attention


class BlockReader(Protocol):
    """The layers of a block drafter, as a function over a step's rows."""

    def __call__(
        self, params: Any, tokens: jax.Array, cache: Cache, batch: Batch, /
    ) -> tuple[jax.Array, Cache]:
        """Compute the rows of a block, which attend to each other both ways.

        Args:
          params: the weights, any pytree.
          tokens: i32[R], the newest token of each sequence, then mask tokens.
          cache: with the drafter's layers only; the rows' keys are written.
          batch: the rows, under a `SpanMask`.

        Returns:
          f32[R, V], logits of the token at each row's own place, and the cache.
        """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """A block drafter: mask tokens behind the newest token become draft tokens at once.

    The keys of cached tokens are projections of the target's hidden states (Chen et
    al., "DFlash: Block Diffusion for Flash Speculative Decoding", 2026). With `follow`
    each draft token depends on the one before it (Cheng et al., "DSpark: Confidence-
    Scheduled Speculative Decoding with Semi-Autoregressive Generation", 2026; its
    confidence head is not used).

    Attributes:
      reader: computes a block's rows (`jkv.drafters.BlockReader`); static.
      write: writes the keys of accepted rows, given the weights, their hidden states
        f32[R, A], the cache with the drafter's layers only, and the batch; returns the
        cache; static.
      params: the weights, of both.
      config: the sizes of its layers in the cache; static.
      aux_layers: the target's layers, by their inputs; static.
      mask_token: the id of a mask token; static.
      num_tokens: draft tokens of a sequence in a step; static.
      cost: time of a step with drafting, relative to a plain step; static.
      from_newest: the newest token's row gives the first draft token, as in DSpark, and
        a block has `num_tokens` rows. Without it the first mask token's does, and a
        block has a row more. Static.
      follow: corrects the logits of a draft token, given the weights, f32[B, V] and the
        token before it, i32[B]; returns f32[B, V]. None for none; static.

    Raises:
      UsageError: for a number out of its range, or a field of another type.
    """

    reader: BlockReader = dataclasses.field(metadata={"static": True})
    write: Any = dataclasses.field(metadata={"static": True})
    params: Any
    config: CacheConfig = dataclasses.field(metadata={"static": True})
    aux_layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    mask_token: int = dataclasses.field(metadata={"static": True})
    num_tokens: int = static(15)
    cost: float = static(1.5)
    from_newest: bool = static(False)
    follow: Any = static(None)

    def __post_init__(self) -> None:
        check_sizes(self.num_tokens, self.cost)
        check_function("reader", self.reader)
        check_function("write", self.write)
        if self.follow is not None:
            check_function("follow", self.follow)
        check_config(self.config)
        check_aux_layers(self.aux_layers)
        check_static("mask_token", self.mask_token, 0)

    @property
    def groups(self) -> tuple[CacheConfig, ...]:
        """The sizes of its layers."""
        return (self.config,)

    def update(
        self,
        cache: Cache,
        batch: Batch,
        tokens: jax.Array,
        hidden: jax.Array,
        previous: jax.Array,
    ) -> Cache:
        """Write the keys of accepted rows, from the target's hidden states."""
        del tokens, previous
        own = self.write(self.params, hidden, own_layers(cache, self), batch)
        return rejoin(own, cache)

    def draft(
        self, cache: Cache, step: DraftStep
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Draft all tokens in one pass."""
        batch, most = step.batch, 1 + self.num_tokens
        owner = find_owners(batch.query_starts, 0, batch.num_rows)
        row = jnp.arange(batch.num_rows, dtype=jnp.int32)
        rank = row - gather(batch.query_starts, owner)
        newest = gather(step.newest, owner)
        tokens = jnp.where(rank == 0, newest, jnp.int32(self.mask_token))
        # A block from the newest token on ends a row before the step's last one.
        first = 0 if self.from_newest else 1
        last = gather(batch.query_lengths, owner) - 2 + first
        last = jnp.where(batch.valid, last, -1)
        spans = step.with_mask(SpanMask(last), max_span=min(most, batch.num_rows))
        spans = plan_attention(cache, spans)
        logits, own = self.reader(self.params, tokens, own_layers(cache, self), spans)
        before = step.newest
        for index in range(self.num_tokens):
            place = batch.query_starts + first + index
            found = gather(logits, jnp.minimum(place, batch.num_rows - 1))
            if self.follow is not None:
                found = self.follow(self.params, found, before)
            before = step.choose(index, found)
        return rejoin(own, cache), *step.drafted

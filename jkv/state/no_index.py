"""The index that finds nothing: what a cache without prefix caching has."""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.state.index import Found, FoundBlocks
from jkv.state.metadata import Metadata


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NoIndex:
    """Nothing can be found again: an `Index` that has nothing to note."""

    is_there = False
    snapshot_every = None
    num_places = 0

    def find(self, metadata: Metadata, _tokens: object, salts: jax.Array) -> Found:
        return find_nothing(metadata, salts.shape)

    def texts_of(self, metadata: Metadata, row: jax.Array) -> jax.Array:
        return jnp.full((*row.shape, metadata.max_context_length), -1, jnp.int32)

    def knows(self, _metadata: Metadata, _number: int, block: jax.Array) -> jax.Array:
        return jnp.zeros(block.shape, bool)

    def count_snapshots(self) -> jax.Array:
        return jnp.int32(0)

    def forget(self, metadata: Metadata, *_: object) -> tuple[Metadata, jax.Array]:
        return metadata, jnp.int32(0)

    def commit(self, metadata: Metadata, _batch: object) -> tuple[Metadata, tuple[()]]:
        return metadata, ()

    def _find_none(self, *_: object) -> None:
        """Find nothing."""

    find_state = find_partings = find_partings_behind = _find_none
    epochs_of = leave = _find_none

    def _note_nothing(self, metadata: Metadata, *_: object) -> Metadata:
        return metadata

    begin = enter = record = inherit = cut = use = _note_nothing
    forget_rewritten = rename = reenter = _note_nothing


def find_nothing(metadata: Metadata, shape: tuple[int, ...]) -> Found:
    """Return that nothing is found of prompts, nor looked for."""
    none = jnp.zeros(shape, jnp.int32)
    columns = jnp.zeros((*shape, 0), jnp.int32)
    nothing = FoundBlocks(columns, 0, None)
    return Found(none, none, dict.fromkeys(metadata.block_numbers, nothing))

"""The parts of a cache together."""

from collections.abc import Sequence

import jax

from jkv.metadata import tables
from jkv.metadata.part import Done, Exchanging, Judged, Moves, Part
from jkv.state import Metadata


def parts_of(metadata: Metadata) -> tuple[Part, ...]:
    """Return the parts of a cache, as `making` found them."""
    return metadata.parts


def apply_plans(
    metadata: Metadata, plans: Sequence[Judged | Exchanging], done: Done
) -> tuple[Metadata, tuple[Moves, ...]]:
    """Do what is served in each part, and return what its storage is to follow."""
    moves = []
    for plan in plans:
        metadata, of_part = plan.apply(metadata, done)
        moves.append(of_part)
    return metadata, tuple(moves)


def close_sequences(
    metadata: Metadata, seq_ids: jax.Array, closable: jax.Array
) -> Metadata:
    """Give back rows, i32[B], distinct where bool[B], and all that they have."""
    metadata = tables.close_rows(metadata, seq_ids, closable)
    for part in parts_of(metadata):
        metadata = part.close(metadata, seq_ids, closable)
    return metadata

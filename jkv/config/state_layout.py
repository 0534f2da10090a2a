"""Every array of a cache that has to do with states: `jkv.config.layout` adds them up.

Symbols: L layers, S sequences, P places of snapshots, Q tokens that may be pending, X
tokens that a sequence may have.
"""

from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jkv.config.arrays import ArrayLayout, Arrays, within
from jkv.formats.bits import STORED_AS

# An array of one sequence, or of one token: its name, its shape and its dtype.
ArrayOf: TypeAlias = tuple[str, tuple[int, ...], np.dtype]

_I32, _U32 = np.dtype(jnp.int32), np.dtype(jnp.uint32)


class StateSizes(NamedTuple):
    """What decides the arrays of a group with a state, by the names in `StateConfig`.

    All groups of a cache agree in everything but `num_layers`, `arrays`, `inputs`.
    """

    num_layers: int  # L
    arrays: tuple[ArrayOf, ...]  # of one sequence in one layer
    inputs: tuple[ArrayOf, ...]  # of one token in one layer
    max_sequences: int  # S
    max_context_length: int  # X
    block_size: int
    num_snapshots: int  # P
    snapshot_every: int | None
    max_pending: int  # Q
    heads_axes: tuple[tuple[str, int], ...]

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block tables, of groups that have some."""
        return -(-self.max_context_length // self.block_size)


def lay_out_snapshots(sizes: StateSizes) -> Arrays:
    """Return the arrays of `Snapshots`, the same for all groups with a state."""
    places, length = (sizes.num_snapshots,), sizes.max_context_length
    return {
        "lengths": ArrayLayout(places, _I32, fill=0),
        "salts": ArrayLayout(places, _I32, fill=0),
        "hashes": ArrayLayout(places, _U32, fill=0),
        "num_pending": ArrayLayout(places, _I32, fill=0),
        "last_used": ArrayLayout(places, _U32, fill=0),
        "num_uses": ArrayLayout((), _U32, fill=0),
        "texts": ArrayLayout((*places, length), _I32, fill=-1),
        "sequence_texts": ArrayLayout((sizes.max_sequences, length), _I32, fill=-1),
    }


def lay_out_state_storage(sizes: StateSizes, prefix_caching: bool) -> Arrays:
    """Return the arrays of a `StateStorage` by path."""
    layers, rows = sizes.num_layers, sizes.max_sequences
    pending = [
        (name, (sizes.max_pending, *shape), dtype)
        for name, shape, dtype in (sizes.inputs if sizes.max_pending else ())
    ]
    arrays = {"bases": ArrayLayout((layers, rows), _I32, fill=0)}
    arrays |= within("rows", _spread(sizes.arrays, layers, rows))
    arrays |= within("inputs", _spread(pending, layers, rows))
    if prefix_caching:
        places = sizes.num_snapshots
        arrays |= within("snapshot_rows", _spread(sizes.arrays, layers, places))
        arrays |= within("snapshot_inputs", _spread(pending, layers, places))
    return arrays


def _spread(arrays: object, layers: int, rows: int) -> Arrays:
    """Return arrays of one sequence as those of all layers and rows."""
    return {
        name: ArrayLayout((layers, rows, *shape), STORED_AS.get(dtype, dtype), fill=0)
        for name, shape, dtype in arrays  # type: ignore[attr-defined]
    }

"""Recurrent states of fixed size: groups of layers without blocks.

A sequence's row in every array is its id. A row's state includes the tokens up to its
*base*: later tokens are *pending*, and their inputs are stored next to the state, so
that they can be rolled back.

Symbols: L layers, S sequences, P places of snapshots, Q pending tokens at most, X
tokens of a sequence at most.
"""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jkv.config import state_layout as layout
from jkv.config.state_layout import divide_states
from jkv.sharding.storage_sharding import Divided, DividedAxes
from jkv.state.metadata import Metadata


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class States:
    """Metadata of a group of recurrent-state layers, the same for all its rows."""

    kind = "states"
    # Q; static, as no array implies it.
    max_pending: int = dataclasses.field(metadata={"static": True})


# The fields of `StateStorage` that hold arrays by name.
PARTS = ("rows", "inputs", "snapshot_rows", "snapshot_inputs")


class StateSizes(NamedTuple):
    """Sizes of a group's states that a batch and its cache share."""

    num_layers: int
    max_pending: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateStorage:
    """States of one group of layers, by row, and their snapshots, by place.

    bfloat16 is stored as its bits.
    """

    kind = "states"
    sharding = None

    bases: jax.Array  # i32[L, S], number of tokens in the state of a row
    rows: dict[str, jax.Array]  # by name [L, S, ...]
    # By name [L, S, Q, ...], of pending tokens, oldest first; empty without them.
    inputs: dict[str, jax.Array]
    snapshot_rows: dict[str, jax.Array]  # by name [L, P, ...]; empty without snapshots
    snapshot_inputs: dict[str, jax.Array]  # by name [L, P, Q, ...], likewise
    # dtypes that the bits of `rows` encode, in the order of the names; static.
    row_dtypes: tuple[np.dtype[Any], ...] = dataclasses.field(metadata={"static": True})
    # Likewise of `inputs`; static.
    input_dtypes: tuple[np.dtype[Any], ...] = dataclasses.field(
        metadata={"static": True}
    )
    # Axis of each state that a mesh may shard, in the order of the names, -1 for none;
    # static.
    row_axes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    # Likewise of each token's input; static.
    input_axes: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """All arrays, by path."""
        return {"bases": self.bases} | {
            f"{part}.{name}": array
            for part in PARTS
            for name, array in getattr(self, part).items()
        }

    def with_arrays(self, arrays: dict[str, Any]) -> Self:
        """Return the storage with other arrays or placeholders."""
        parts: dict[str, Any] = {part: {} for part in PARTS}
        for path, array in arrays.items():
            part, _, name = path.partition(".")
            if name:
                parts[part][name] = array
        return dataclasses.replace(self, bases=arrays["bases"], **parts)

    def encoded_dtype(self, _path: str) -> None:
        """Return None: files hold the bits as they are."""

    def with_sharding(self, _sharding: None) -> Self:
        """Return self: the arrays carry their own sharding."""
        return self

    def implied_sizes(self, metadata: Metadata, _group: States) -> layout.StateSizes:
        """Return the sizes that some of the arrays imply for all others."""
        return layout.StateSizes(
            num_layers=self.num_layers,
            arrays=_list_arrays(self.rows, self.row_dtypes, 2),
            inputs=_list_arrays(self.inputs, self.input_dtypes, 3),
            max_sequences=metadata.max_sequences,
            max_context_length=metadata.max_context_length,
            block_size=metadata.block_size,
            num_snapshots=metadata.index.num_snapshots,
            snapshot_every=metadata.index.snapshot_every,
            max_pending=metadata.max_pending,
            heads_axes=(),
        )

    def divide(
        self, mesh: jax.sharding.Mesh, heads: str | None, _context: str | None
    ) -> Divided:
        """Return the sharding of the arrays over a mesh."""
        shapes = {path: array.shape for path, array in self.arrays.items()}
        return layout.divide_arrays(self.divided, shapes, mesh, heads)

    @property
    def divided(self) -> dict[str, DividedAxes]:
        """The axes that a mesh may shard, by path."""
        # By name, because files have another order.
        return divide_states(
            dict(zip(sorted(self.rows), self.row_axes, strict=True)),
            dict(zip(sorted(self.inputs), self.input_axes, strict=True)),
        )

    @property
    def num_layers(self) -> int:
        """Number of layers stored, L; 0 without storage."""
        return self.bases.shape[0]

    @property
    def sizes(self) -> StateSizes:
        """Sizes that the batches planned on the group share."""
        pending = [array.shape[2] for array in self.inputs.values()]
        return StateSizes(self.num_layers, max(pending, default=0))


def _list_arrays(
    arrays: dict[str, jax.Array], dtypes: tuple[np.dtype[Any], ...], skipped: int
) -> tuple[layout.ArrayOf, ...]:
    """Return name, shape and dtype of each array per layer and sequence, or token."""
    named = zip(sorted(arrays.items()), dtypes, strict=True)
    return tuple((name, a.shape[skipped:], dtype) for (name, a), dtype in named)

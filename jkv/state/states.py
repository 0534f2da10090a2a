"""States of fixed size: what sequences have in groups of layers without blocks.

The row of a sequence in every array is its number. A row's state stands at the row's
*base*: the tokens after it are *pending*, and their inputs are kept beside it, so that
they can be taken back.

Symbols: L layers, S sequences, P places of snapshots, Q tokens that may be pending, X
tokens that a sequence may have.
"""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jkv.config.state_layout import divide_states
from jkv.sharding.storage_sharding import DividedAxes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class States:
    """What there is to know of a group with a state: all agree in it."""

    has_blocks = False
    # Q, tokens of a sequence that may be pending; static, as arrays do not tell it.
    max_pending: int = dataclasses.field(metadata={"static": True})


# The fields of `StateStorage` that hold arrays by name.
PARTS = ("rows", "inputs", "snapshot_rows", "snapshot_inputs")


class StateSizes(NamedTuple):
    """The sizes of a group's states, in which a batch and its cache agree."""

    num_layers: int
    max_pending: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateStorage:
    """The states of one group of layers, by row, and those of the snapshots, by place.

    bfloat16 is stored as its bits.
    """

    has_blocks = False

    bases: jax.Array  # i32[L, S], at how many tokens the state of a row stands
    rows: dict[str, jax.Array]  # by name [L, S, ...], the states
    # By name [L, S, Q, ...], of pending tokens, oldest first; empty without them.
    inputs: dict[str, jax.Array]
    snapshot_rows: dict[str, jax.Array]  # by name [L, P, ...]; empty without snapshots
    snapshot_inputs: dict[str, jax.Array]  # by name [L, P, Q, ...], likewise
    # What the stored bits of `rows` mean, in the order of the names; static.
    row_dtypes: tuple[np.dtype[Any], ...] = dataclasses.field(metadata={"static": True})
    # Likewise those of `inputs`; static.
    input_dtypes: tuple[np.dtype[Any], ...] = dataclasses.field(
        metadata={"static": True}
    )
    # The axis of each state, in the order of the names, that a mesh may divide, -1 for
    # none; static.
    row_axes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    # Likewise that of each token's input; static.
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
        """Return the storage with other arrays, or with what stands for arrays."""
        parts: dict[str, Any] = {part: {} for part in PARTS}
        for path, array in arrays.items():
            part, _, name = path.partition(".")
            if name:
                parts[part][name] = array
        return dataclasses.replace(self, bases=arrays["bases"], **parts)

    @property
    def divided(self) -> dict[str, DividedAxes]:
        """Which axis of an array a mesh may divide, by path; of others none."""
        # By name: files have another order.
        return divide_states(
            dict(zip(sorted(self.rows), self.row_axes, strict=True)),
            dict(zip(sorted(self.inputs), self.input_axes, strict=True)),
        )

    @property
    def num_layers(self) -> int:
        """Layers stored, L; 0 without storage."""
        return self.bases.shape[0]

    @property
    def sizes(self) -> StateSizes:
        """The sizes in which the group and the batches planned on it agree."""
        pending = [array.shape[2] for array in self.inputs.values()]
        return StateSizes(self.num_layers, max(pending, default=0))

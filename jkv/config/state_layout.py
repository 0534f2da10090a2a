"""The arrays of recurrent-state layers, as parts of `jkv.config.layout`.

Symbols: L layers, S sequences, P snapshots, Q pending tokens, X tokens of the longest
context.
"""

from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.counts import ArrayLayout, Arrays, count_bytes, human_bytes, within
from jkv.formats.format import STORED_AS
from jkv.sharding.storage_sharding import Divided, DividedAxes, find_spec

# An array of one sequence, or of one token: its name, its shape and its dtype.
ArrayOf: TypeAlias = tuple[str, tuple[int, ...], np.dtype]

_I32, _U32 = np.dtype(jnp.int32), np.dtype(jnp.uint32)


class StateSizes(NamedTuple):
    """The fields of a `StateConfig` that determine the arrays of a group.

    All state groups of a cache agree in all fields but `num_layers`, `arrays`,
    `inputs`.
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
    def kind(self) -> str:
        """The kind of cached data."""
        return "states"

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block tables of groups with blocks."""
        return -(-self.max_context_length // self.block_size)

    def with_copies(self, _copies: int) -> Self:
        """Return the sizes unchanged, as states have no kv heads to replicate."""
        return self

    def divide(
        self, mesh: jax.sharding.Mesh, heads: str | None, _context: str | None
    ) -> Divided:
        """Return the sharding of the arrays on a mesh, or raise ValueError."""
        arrays = self.lay_out_storage(True)
        shapes = {path: array.shape for path, array in arrays.items()}
        return divide_arrays(self.divided, shapes, mesh, heads)

    def lay_out_group(self, _prefix_caching: bool, _has_tokens: bool) -> Arrays:
        """Return no arrays; pending tokens are counted per sequence."""
        return {}

    def lay_out_storage(self, prefix_caching: bool = False) -> Arrays:
        """Return the arrays of a `StateStorage` by path."""
        layers, rows = self.num_layers, self.max_sequences
        pending = [
            (name, (self.max_pending, *shape), dtype)
            for name, shape, dtype in (self.inputs if self.max_pending else ())
        ]
        arrays = {"bases": ArrayLayout((layers, rows), _I32, fill=0)}
        arrays |= within("rows", _spread(self.arrays, layers, rows))
        arrays |= within("inputs", _spread(pending, layers, rows))
        if prefix_caching:
            places = self.num_snapshots
            arrays |= within("snapshot_rows", _spread(self.arrays, layers, places))
            arrays |= within("snapshot_inputs", _spread(pending, layers, places))
        return arrays

    @property
    def divided(self) -> dict[str, DividedAxes]:
        """The axis of each array to shard over a mesh, by path."""
        axes = dict(self.heads_axes)
        names = [name for name, *_ in self.arrays], [name for name, *_ in self.inputs]
        return divide_states(*({n: axes.get(n, -1) for n in each} for each in names))

    @property
    def constants(self) -> dict[str, dict[str, Any]]:
        """Static fields of the group's metadata and storage."""
        axes = dict(self.heads_axes)
        inputs = self.inputs if self.max_pending else ()
        storage = {
            "row_dtypes": tuple(dtype for *_, dtype in self.arrays),
            "input_dtypes": tuple(dtype for *_, dtype in inputs),
            "row_axes": tuple(axes.get(name, -1) for name, *_ in self.arrays),
            "input_axes": tuple(axes.get(name, -1) for name, *_ in inputs),
        }
        return {
            "metadata.groups": {"max_pending": self.max_pending},
            "storage": storage,
        }

    def describe(self, prefix_caching: bool) -> tuple[str, str]:
        """Summarize the state of the layers, and the number of states."""
        shapes = (
            f"{name} {list(shape)} {dtype.name}" for name, shape, dtype in self.arrays
        )
        what = [f"{self.num_layers} layers", f"a state of {', '.join(shapes)}"]
        if self.max_pending:
            what.append(f"{self.max_pending} tokens can be taken back")
        of_states = count_bytes(self.lay_out_storage().values())
        each = human_bytes(of_states // self.max_sequences)
        places = f"{self.max_sequences:,} states"
        if prefix_caching:
            places += f" and {self.num_snapshots:,} snapshots"
        return ", ".join(what), f"{places}, {each} each"


def divide_states(
    rows: dict[str, int], inputs: dict[str, int]
) -> dict[str, DividedAxes]:
    """Return the axis of each array of a `StateStorage` to shard, by path.

    `rows` and `inputs` map names to axes of one state or token, -1 for replicated.
    """
    # Leading axes: layers and rows or snapshots; for inputs also tokens.
    kinds = ("rows", rows, 2), ("inputs", inputs, 3)
    return {
        f"{before}{part}.{name}": DividedAxes(axis + skipped)
        for part, axes, skipped in kinds
        for name, axis in axes.items()
        if axis >= 0
        for before in ("", "snapshot_")
    }


def divide_arrays(
    divided: dict[str, DividedAxes],
    shapes: dict[str, tuple[int, ...]],
    mesh: jax.sharding.Mesh,
    heads: str | None,
) -> Divided:
    """Return the sharding of the arrays of states on a mesh."""
    specs: dict[str, jax.sharding.PartitionSpec] = {}
    if heads is None:
        return None, specs
    num_devices = mesh.shape[heads]
    for path, axes in divided.items():
        axis = axes.heads
        size = shapes[path][axis] if path in shapes and axis is not None else 0
        specs[path] = find_spec(axes, heads, None)
        if size % num_devices:
            raise ValueError(
                f"heads_axes: axis {axis} of {path} has {size} elements, which the "
                f"{num_devices} devices of mesh axis {heads!r} cannot share evenly; "
                f"omit its name to replicate it"
            )
    return None, specs


def lay_out_snapshots(sizes: StateSizes) -> Arrays:
    """Return the arrays of `Snapshots`, shared by all state groups."""
    places, length = (sizes.num_snapshots,), sizes.max_context_length
    return {
        "lengths": ArrayLayout(places, _I32, fill=0),
        "salts": ArrayLayout(places, _I32, fill=0),
        "hashes": ArrayLayout(places, _U32, fill=0),
        "num_pending": ArrayLayout(places, _I32, fill=0),
        "last_used": ArrayLayout(places, _U32, fill=0),
        "num_uses": ArrayLayout((), _U32, fill=0),
        "tokens": ArrayLayout((*places, length), _I32, fill=-1),
        "sequence_tokens": ArrayLayout((sizes.max_sequences, length), _I32, fill=-1),
    }


def _spread(arrays: object, layers: int, rows: int) -> Arrays:
    """Return arrays of one sequence with leading axes for layers and rows."""
    return {
        name: ArrayLayout((layers, rows, *shape), STORED_AS.get(dtype, dtype), fill=0)
        for name, shape, dtype in arrays  # type: ignore[attr-defined]
    }

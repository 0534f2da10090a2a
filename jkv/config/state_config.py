"""StateConfig: recurrent-state layers, with a state of fixed size per sequence."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp

from jkv.arguments import explains_class
from jkv.config.counts import checked_count, count_bytes
from jkv.config.state_layout import StateSizes
from jkv.formats.format import STORED_AS

# Shape and dtype of an array of one sequence, or of one token, in one layer.
ArrayOf: TypeAlias = tuple[tuple[int, ...], Any]

COUNTS = ("num_layers", "max_sequences", "max_context_length", "block_size")


class _Fixed(dict[str, Any]):
    """A hashable dict, never modified after construction."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


class _Arrays(_Fixed):
    """Shapes and dtypes by name, sorted."""

    def __repr__(self) -> str:
        named = self.items()
        return repr({name: (shape, dtype.name) for name, (shape, dtype) in named})


@explains_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class StateConfig:
    """Sizes of a group of recurrent-state layers (Mamba, linear attention).

    Pass it to `init` for a model with such layers only, or as one of the groups of a
    `GroupedConfig`.

    Args:
      num_layers: layers of the group, L.
      arrays: shape and dtype of each array of a sequence's state in one layer, by name,
        as in `{"memory": ((8, 128, 128), "float32")}`; dtypes are float32, float16,
        bfloat16 and integers of whole bytes.
      max_sequences: most open sequences, S.
      max_context_length: most tokens of a sequence.
      block_size: of the groups with blocks, if there are any.
      num_snapshots: number of snapshots of states for prefix caching. Each takes the
        bytes of a sequence's state, and 4 for each of `max_context_length` tokens.
      snapshot_every: with prefix caching, `commit` takes a snapshot at lengths that are
        multiples of this; itself a multiple of `block_size`.
      max_pending: most pending tokens of a sequence, Q, which can be rolled back. The
        state excludes them, and the cache stores their `inputs`, which are smaller than
        further states (ReplaySSM, https://dao-lab.ai/blog/2026/replayssm/). Speculative
        decoding needs the number of its draft tokens.
      inputs: with `max_pending`, shape and dtype of each array of a token's input to a
        layer's state, by name.
      heads_axes: the axis of each array, in `arrays` or `inputs`, to shard with
        `init(heads=)`; arrays without an entry are replicated.

    Raises:
      ValueError: an invalid field or combination of fields.

    Example:
      >>> import jkv
      >>> config = jkv.StateConfig(
      ...     num_layers=3, arrays={"delta": ((2, 8, 8), "float32")}, max_sequences=4,
      ...     max_context_length=256)
      >>> config.bytes_per_sequence
      1548
    """

    num_layers: int
    arrays: Mapping[str, ArrayOf]
    max_sequences: int
    max_context_length: int
    block_size: int = 16
    num_snapshots: int = 0
    snapshot_every: int | None = None
    max_pending: int = 0
    inputs: Mapping[str, ArrayOf] | None = None
    heads_axes: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        """Normalize the dicts and validate all fields."""
        for name in COUNTS:
            object.__setattr__(self, name, checked_count(name, getattr(self, name)))
        for name in ("num_snapshots", "max_pending"):
            if getattr(self, name) != 0:
                count = checked_count(name, getattr(self, name))
                object.__setattr__(self, name, count)
        object.__setattr__(self, "arrays", _checked_arrays("arrays", self.arrays))
        inputs = _checked_arrays("inputs", self.inputs or {})
        object.__setattr__(self, "inputs", inputs)
        if not self.arrays:
            raise ValueError("arrays must name at least one array of a state, got none")
        if bool(self.inputs) != bool(self.max_pending):
            raise ValueError(
                f"max_pending and inputs must be given together, as inputs are stored "
                f"for pending tokens, got max_pending {self.max_pending} and inputs "
                f"{self.inputs}; pass or omit both"
            )
        if self.snapshot_every is not None:
            every = checked_count("snapshot_every", self.snapshot_every)
            if every % self.block_size:
                raise ValueError(
                    f"snapshot_every must be a multiple of block_size, got {every} and "
                    f"{self.block_size}"
                )
        object.__setattr__(self, "heads_axes", self._checked_axes())

    def _checked_axes(self) -> _Fixed:
        axes = dict(self.heads_axes or {})
        known = {**self.arrays, **(self.inputs or {})}
        for name, axis in axes.items():
            num_axes = len(known[name][0]) if name in known else 0
            if not (isinstance(axis, int) and 0 <= axis < num_axes):
                raise ValueError(
                    f"heads_axes must name an axis of an array in arrays or inputs, "
                    f"{ {name: shape for name, (shape, _) in known.items()} }, got "
                    f"{name!r}: {axis!r}"
                )
        return _Fixed(axes)

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block tables of groups with blocks, M."""
        return self.sizes.max_blocks_per_sequence

    @property
    def sizes(self) -> StateSizes:
        """The sizes of the group, as input of `jkv.config.layout`."""
        axes = tuple(sorted((self.heads_axes or {}).items()))
        arrays, inputs = (
            tuple((name, *array) for name, array in (given or {}).items())
            for given in (self.arrays, self.inputs)
        )
        flat = dict(arrays=arrays, inputs=inputs, heads_axes=axes)
        return StateSizes(**vars(self) | flat)

    @property
    def storage_bytes(self) -> int:
        """Bytes of the states of all sequences, with their pending inputs."""
        stored = self.sizes.lay_out_storage()
        return count_bytes(stored.values())

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of one sequence's state in all layers, with its pending inputs."""
        return self.storage_bytes // self.max_sequences


def _checked_arrays(field: str, arrays: Mapping[str, ArrayOf]) -> _Arrays:
    """Validate the arrays of a field and sort them by name."""
    if not isinstance(arrays, Mapping):
        raise ValueError(
            f"{field} must be a dict of a shape and a dtype for each name, as in "
            f'{field}={{"delta": ((8, 128, 128), "float32")}}, got {arrays!r}'
        )
    checked = {name: _checked_array(field, name, arrays[name]) for name in arrays}
    return _Arrays(sorted(checked.items()))


def _checked_array(field: str, name: str, array: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape and dtype of one array, or raise ValueError."""
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"a name in {field} must be an identifier, got {name!r}")
    try:
        shape, dtype = array
        shape, dtype = tuple(int(size) for size in shape), jnp.dtype(dtype)
    except (TypeError, ValueError):
        raise ValueError(
            f"{field}[{name!r}] must be a shape and a dtype, as in ((8, 128), "
            f'"float32"), got {array!r}'
        ) from None
    if any(size < 1 for size in shape) or math.prod(shape) > 2**31 - 1:
        raise ValueError(
            f"{field}[{name!r}] must have positive sizes and at most 2^31 - 1 "
            f"elements, got {shape}"
        )
    is_integer = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits >= 8
    is_byte = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1
    if not (dtype in STORED_AS or is_integer) or is_byte:
        raise ValueError(
            f"{field}[{name!r}] must be float32, float16, bfloat16 or an integer type "
            f"of whole bytes, got {dtype.name}"
        )
    return shape, dtype

"""Cached data of a model's layers: keys and values, sliding windows and states.

One group of layers keeps all tokens of every layer. With a group per window
(`GroupedConfig`) windowed layers release the tokens left of it.
"""

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """The shape of a token's keys and values in one layer."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int

    def as_fields(self) -> dict[str, int]:
        """Return the fields of a `CacheConfig`, without a redundant value head dim."""
        fields = self._asdict()
        if self.value_head_dim == self.head_dim:
            del fields["value_head_dim"]
        return fields

    def __str__(self) -> str:
        values = f", values of {self.value_head_dim}"
        beside = values if self.value_head_dim != self.head_dim else ""
        return f"{self.num_kv_heads} kv heads of {self.head_dim}{beside}"


class Array(NamedTuple):
    """An array of a state, or of a token's input to it."""

    shape: tuple[int, ...]
    dtype: str | None = None  # None for the model's dtype
    heads_axis: int | None = None  # axis to shard over a mesh; None without heads


class LayerState(NamedTuple):
    """The state of a sequence in one layer, and the input of a pending token.

    arrays: of the state, by name.
    inputs: of one token, from which the next state is computed, by name.
    """

    arrays: tuple[tuple[str, Array], ...]
    inputs: tuple[tuple[str, Array], ...]

    def divide(self, num_devices: int) -> "LayerState":
        """Return the state per device: heads are sharded, the rest is replicated."""

        def divide(array: Array) -> Array:
            axis, shape = array.heads_axis, [*array.shape]
            if axis is not None and shape[axis] % num_devices == 0:
                shape[axis] //= num_devices
            return array._replace(shape=tuple(shape))

        return LayerState(
            *(tuple((name, divide(array)) for name, array in each) for each in self)
        )

    def as_fields(self, dtype: Any, *, has_inputs: bool) -> dict[str, Any]:
        """Return the fields of a `StateConfig` for a model of the given dtype."""
        named = self.arrays + self.inputs if has_inputs else self.arrays
        axes = {name: array.heads_axis for name, array in named}
        arrays, inputs = (
            {name: (array.shape, array.dtype or dtype) for name, array in each}
            for each in self
        )
        return dict(
            arrays=arrays,
            inputs=inputs if has_inputs else None,
            heads_axes={name: axis for name, axis in axes.items() if axis is not None},
        )


class Kept(NamedTuple):
    """The cached data of a layer."""

    attends: bool  # has keys and values
    state: LayerState | None

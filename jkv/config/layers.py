"""What layers of a model keep: keys and values, of a window or not, or a state.

With a single group of layers a cache keeps all tokens of every one. With a group for
each window (`GroupedConfig`) the others keep no more than their rows see.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Heads(NamedTuple):
    """What a token takes in one layer."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int

    def as_fields(self) -> dict[str, int]:
        """Return them as fields; values as wide as keys go without saying."""
        fields = self._asdict()
        if self.value_head_dim == self.head_dim:
            del fields["value_head_dim"]
        return fields

    def __str__(self) -> str:
        values = f", values of {self.value_head_dim}"
        beside = values if self.value_head_dim != self.head_dim else ""
        return f"{self.num_kv_heads} kv heads of {self.head_dim}{beside}"


class Array(NamedTuple):
    """An array of a state, or of what a token adds to it."""

    shape: tuple[int, ...]
    dtype: str | None = None  # None: the model's own
    heads_axis: int | None = None  # that a mesh may divide; None: it has no heads


class LayerState(NamedTuple):
    """What a layer keeps of a sequence, and of a token that may be taken back.

    arrays: of the state, by name.
    inputs: of a token, from which the state after it follows, by name.
    """

    arrays: tuple[tuple[str, Array], ...]
    inputs: tuple[tuple[str, Array], ...]

    def divide(self, num_devices: int) -> "LayerState":
        """Return what each of several devices keeps: its heads, and the rest whole."""

        def divide(array: Array) -> Array:
            axis, shape = array.heads_axis, [*array.shape]
            if axis is not None and shape[axis] % num_devices == 0:
                shape[axis] //= num_devices
            return array._replace(shape=tuple(shape))

        return LayerState(
            *(tuple((name, divide(array)) for name, array in each) for each in self)
        )

    def as_fields(self, dtype: Any, *, has_inputs: bool) -> dict[str, Any]:
        """Return them as fields of `StateConfig`, for a model of a dtype."""
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
    """What a layer of a model keeps of a sequence."""

    attends: bool  # keys and values
    state: LayerState | None


class Windows(NamedTuple):
    """How many layers have a window, and its tokens."""

    num_layers: int
    length: int


def count_windows(layers: Sequence[int | None]) -> Windows | None:
    """Return how many of these layers have a window, None if all see everything."""
    lengths = [length for length in layers if length is not None]
    return Windows(len(lengths), max(lengths)) if lengths else None


def order_windows(layers: Sequence[int | None]) -> list[int | None]:
    """Return the different windows of layers, the one that sees furthest first."""
    different = set(layers)
    finite = sorted((window for window in different if window), reverse=True)
    return [None, *finite] if None in different else [*finite]


def find_leader(windows: Sequence[int | None]) -> int:
    """Return the index of the first window that sees furthest, of none 0."""
    if not windows:
        return 0
    return windows.index(order_windows(windows)[0])

"""Numbers as they are, in the dtype that they are cast to."""

import dataclasses
import functools
from typing import Any, NoReturn

import jax

from jkv.formats.bits import as_bits, as_stored, to_float32
from jkv.formats.format import Element, Format, Parts


@dataclasses.dataclass(frozen=True)
class Numbers(Format):
    """Each number for itself: float32, float16, bfloat16; in plain arrays fp8, too."""

    def arrays(self, width: int) -> dict[str, Element]:
        return {"pool": Element((width,), self.stored_as, self.dtype)}

    def prepare(self, rows: jax.Array) -> jax.Array:
        """Cast; what is stored as bits has no derivative from here on."""
        if self.stored_as != self.dtype:
            rows = without_derivative(rows, self.dtype.name)
        return rows.astype(self.dtype)

    def put(self, rows: jax.Array) -> Parts:
        return {"pool": as_stored(rows)}

    def get(self, stored: Parts) -> tuple[jax.Array, jax.Array | None]:
        """Return what the bits mean; nothing is multiplied."""
        return to_float32(stored["pool"], self.dtype), None

    def read(self, stored: Parts) -> jax.Array:
        """Return the numbers in their dtype."""
        return as_bits(stored["pool"], self.dtype)


def without_derivative(rows: jax.Array, dtype: str) -> jax.Array:
    """Return rows of which no derivative can be had, as they are stored as bits."""
    return _cut_off(rows, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _cut_off(rows: jax.Array, dtype: str) -> jax.Array:
    del dtype
    return rows


@_cut_off.defjvp
def _refuse_derivative(dtype: str, _primals: Any, _tangents: Any) -> NoReturn:
    raise ValueError(
        f"there is no derivative with respect to keys and values stored as {dtype}: it "
        f"would be zero without a word. Differentiate on a cache with "
        f"CacheConfig(dtype='float32'), or cut them off with jax.lax.stop_gradient"
    )

"""Arrays from the host on a device, in memory that a donated step can reuse.

JAX on a CPU borrows a numpy array that begins at a multiple of 64 bytes, whatever
`may_alias` says, and what is borrowed cannot be updated in place: the first donated
step would copy it. An array that begins elsewhere is copied at once, by `device_put`,
without a program to be compiled for its shape.
"""

import functools
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jkv.state.cache import Device

Placement: TypeAlias = Device | jax.sharding.Sharding | None  # None: JAX's choice

Arrays = TypeVar("Arrays")

_ALIGNMENT = 64


def place(arrays: Arrays, device: Placement) -> Arrays:
    """Put a pytree of numpy arrays on a device, all in one call.

    Args:
      arrays: the pytree.
      device: where to.

    Returns:
      The pytree of JAX arrays, no two of which share a buffer with another or with one
      of numpy's.
    """
    return jax.device_put(jax.tree.map(_unaligned, arrays), device)


def place_by_layers(array: np.ndarray | jax.Array, device: Placement) -> jax.Array:
    """Put an array, [L, ...], on a device a layer at a time.

    One mapped from a file is then never in the host's memory as a whole.
    """
    pool = jnp.zeros(array.shape, array.dtype, device=device)
    for number, layer in enumerate(array):
        # Waiting keeps copies of layers from piling up on their way.
        pool = jax.block_until_ready(_set_layer(pool, np.int32(number), layer))
    return pool


def _unaligned(array: np.ndarray) -> np.ndarray:
    """Copy an array to memory that begins between two multiples of `_ALIGNMENT`."""
    room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = (_ALIGNMENT // 4 - room.ctypes.data) % _ALIGNMENT
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(pool: jax.Array, number: jax.Array, layer: jax.Array) -> jax.Array:
    return pool.at[number].set(layer)

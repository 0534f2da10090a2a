"""Digest of a model and its weights, the same in every process.

It is the default version of blocks in a store, whose folder outlives the process. It
depends on every element of the weights, on `exact`, and on the model's settings as
shown by its `repr`, closure and constants.
"""

import functools
import hashlib
import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.prefixes.hashing import mixed

# Bits of the golden ratio.
_GOLDEN = np.uint32(0x9E3779B9)

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def digest_weights(model: Any, params: Any, exact: Any) -> str:
    """Return the digest of a model with its weights, 32 hexadecimal digits."""
    found = hashlib.blake2b(repr(exact).encode(), digest_size=16)
    for part in _describe(model):
        found.update(part.encode() + b"\0")
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        found.update(_describe_array(jax.tree_util.keystr(path), leaf).encode())
    return found.hexdigest()


def _describe(value: Any) -> Iterator[str]:
    """Yield descriptions of a model, or of a value captured by its function."""
    if isinstance(value, functools.partial):
        for part in (value.func, *value.args, *sorted(value.keywords.items())):
            yield from _describe(part)
    elif isinstance(value, jax.Array | np.ndarray):
        yield _describe_array("", value)
    elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        for part in value:
            yield from _describe(part)
    elif inspect.isfunction(value):
        code = value.__code__
        yield f"{value.__module__}.{value.__qualname__} {code.co_code.hex()}"
        yield _ADDRESS.sub("", repr(code.co_consts))
        for cell in value.__closure__ or ():
            yield from _describe(cell.cell_contents)
        yield from _describe(value.__defaults__ or ())
    else:
        yield _ADDRESS.sub("", repr(value))


def _describe_array(name: str, array: Any) -> str:
    """Return an array's name, shape, dtype and checksums of all elements."""
    kind = jax.typeof(array)
    if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    sums = np.asarray(_sum_words(array)).tolist()
    return f"{name} {kind.shape} {kind.dtype} {sums}"


@jax.jit
def _sum_words(array: jax.Array) -> jax.Array:
    """Return two position-dependent sums over an array's bits, u32[2]."""
    words = _as_words(jnp.asarray(array))
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, step in enumerate(_find_steps(words.shape)):
        place += step * jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    place *= _GOLDEN  # an odd factor keeps positions distinct
    sums = mixed(words + place), words * (place | np.uint32(1))
    return jnp.stack([jnp.sum(each, dtype=jnp.uint32) for each in sums])


def _find_steps(shape: tuple[int, ...]) -> list[np.uint32]:
    """Return the strides of each axis in elements, u32."""
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return [np.uint32(step % 2**32) for step in steps]


def _as_words(array: jax.Array) -> jax.Array:
    """Return the bits of each element as a word, u32[...]."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    is_integer = jnp.issubdtype(array.dtype, jnp.integer)
    info = jnp.iinfo(array.dtype) if is_integer else jnp.finfo(array.dtype)
    bits = min(info.bits, 32)
    words = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}"))
    return words.astype(jnp.uint32)

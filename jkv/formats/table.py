"""The available formats, and their cost in perplexity."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jkv.formats.format import Format, Numbers
from jkv.formats.packed import Packed
from jkv.formats.scaled import Scaled

FORMATS: dict[np.dtype[Any], Format] = {
    each.dtype: each
    for each in (
        *map(Numbers, map(np.dtype, (jnp.float32, jnp.float16, jnp.bfloat16))),
        Scaled(np.dtype(jnp.int8)),
        Scaled(np.dtype(jnp.float8_e4m3fn)),
        Scaled(np.dtype(jnp.float8_e4m3fnuz)),
        Scaled(np.dtype(jnp.float8_e5m2)),
        Packed(np.dtype(jnp.int4)),
    )
}

# Array dtypes of raw bits, and their possible dtypes of the encoding.
ENCODED_DTYPES: dict[np.dtype[Any], list[np.dtype[Any]]] = {
    bits: [each.dtype for each in FORMATS.values() if each.stored_as == bits]
    for bits in {each.stored_as for each in FORMATS.values()} - FORMATS.keys()
}

# One encoding for all devices, so that saved files are portable.
OTHER_NAMES = {"fp8": np.dtype(jnp.float8_e4m3fn)}


# Increase of perplexity over float32 in per cent, by the dtypes of keys and values, as
# measured by `benchmarks/accuracy.py` (`jkv.measure_formats` for other models).
MODELS = ("SmolLM2 135M", "Gemma 3 270M")
COSTS = {
    ("int8", "int8"): (0.1, 0.4),
    ("float8_e4m3fn", "float8_e4m3fn"): (0.8, 0.3),
    ("int8", "int4"): (1.0, 0.7),
    ("int4", "int4"): (7.7, 13.3),
}


def checked_dtype(dtype: Any, name: str = "dtype") -> np.dtype[Any]:
    """Return a supported numpy dtype, or raise ValueError with the supported ones."""
    if isinstance(dtype, str):
        dtype = OTHER_NAMES.get(dtype, dtype)
    for known in FORMATS:
        try:
            if np.dtype(dtype) == known:
                return known
        except (TypeError, ValueError):
            break
    names = ", ".join([*(known.name for known in FORMATS), *OTHER_NAMES])
    raise ValueError(f"{name} must be one of {names}; got {dtype!r}")


def format_cost(dtype: str, value_dtype: str) -> str:
    """Format the cost, e.g. "+1.0% on SmolLM2 135M, +0.5% on Gemma 3 270M"."""
    costs = zip(COSTS[dtype, value_dtype], MODELS, strict=True)
    return ", ".join(f"{cost:+.1f}% on {model}" for cost, model in costs)

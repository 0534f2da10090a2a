"""Whether attention on this device is what the reference says, feature by feature."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attention import paged_attention
from jkv.commands.cases import CASES, Case, make_operands
from jkv.commands.report import Try
from jkv.formats.table import FORMATS

IMPLEMENTATIONS = ("xla", "pallas")

# Largest error against the reference, by dtype: a few units of the last digit of
# values around 1.
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}

# What a quick look compares: requests of all kinds, and quantized storage.
QUICK_DTYPE = "float32"

QUICK_CASES = ("mixed, with padding", "int8")

# Of what the derivative is compared, too.
DERIVED_CASES = ("mixed, with padding", "sinks")

# Interpreted, the kernel takes as long for one case as the others for several.
QUICK_INTERPRETED = ("mixed, with padding",)


def select_cases(implementation: str, *, is_quick: bool) -> tuple[Case, ...]:
    """Return the cases to compare: all, or a few that show the most."""
    if not is_quick:
        return CASES
    is_interpreted = implementation == "pallas" and on_cpu()
    names = QUICK_INTERPRETED if is_interpreted else QUICK_CASES
    return tuple(case for case in CASES if case.name in names)


def list_tries(
    implementation: str, dtype: str, cases: tuple[Case, ...]
) -> dict[str, Try]:
    """Return calls of one implementation in one dtype to compare, by their names."""
    return {
        case.name: functools.partial(
            compare, find_error, case, dtype, implementation=implementation
        )
        for case in cases
    }


def list_derived(implementation: str) -> dict[str, Try]:
    """Return gradients of pools that are floats to compare, by dtype and case."""
    return {
        f"{dtype}, {case.name}": functools.partial(
            compare, find_gradient_error, case, dtype, implementation=implementation
        )
        for case in CASES
        for dtype in TOLERANCES
        if case.name in DERIVED_CASES
        and FORMATS[jnp.dtype(dtype)].stored_as == jnp.dtype(dtype)
    }


def compare(
    find: Callable[..., float], case: Case, dtype: str, implementation: str
) -> float:
    """Return the error against the reference, which must be within the tolerance."""
    error = find(case, dtype, implementation)
    if not error <= TOLERANCES[dtype]:  # NaN too
        raise ValueError(f"error {error:.2g}")
    return error


def find_error(case: Case, dtype: str, implementation: str) -> float:
    """Return the largest difference from the reference; NaN slots are never read."""
    operands, options = make_operands(case, dtype)
    call = functools.partial(paged_attention, *operands, **options)
    found = jax.jit(functools.partial(call, implementation=implementation))()
    wanted = find_wanted(case, dtype)
    difference = found.astype(jnp.float32) - wanted.astype(jnp.float32)
    # numpy, since XLA on CPU may leave a NaN out of a maximum.
    return float(np.max(np.abs(np.asarray(difference))))


def find_gradient_error(case: Case, dtype: str, implementation: str) -> float:
    """Return the largest difference of a gradient, over the largest number in it."""
    (*arrays, layer, tables, ids, starts, lengths, contexts), options = make_operands(
        case, dtype
    )
    # A gradient of what is not there is 0, and 0 * NaN is NaN.
    arrays = [jnp.nan_to_num(array) for array in arrays]
    rest = layer, tables, ids, starts, lengths, contexts

    def differentiate(implementation: str) -> Any:
        attend = functools.partial(
            paged_attention, implementation=implementation, **options
        )

        def weigh(*arrays: jax.Array) -> jax.Array:
            output = attend(*arrays, *rest)
            weights = jnp.cos(jnp.arange(output.size, dtype=jnp.float32))
            return jnp.sum(output.astype(jnp.float32).reshape(-1) * weights)

        return jax.jit(jax.grad(weigh, argnums=(0, 1, 2)))(*arrays)

    errors = []
    for found, wanted in zip(
        differentiate(implementation), differentiate("reference"), strict=True
    ):
        found, wanted = (np.asarray(each, np.float32) for each in (found, wanted))
        errors.append(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))
    return float(np.max(errors))


@functools.cache
def find_wanted(case: Case, dtype: str) -> jax.Array:
    """Return what the reference makes of a case, the same for all implementations."""
    operands, options = make_operands(case, dtype)
    call = functools.partial(paged_attention, *operands, **options)
    return jax.jit(functools.partial(call, implementation="reference"))()


def on_cpu() -> bool:
    """Return whether JAX runs on the processor itself."""
    return jax.devices()[0].platform == "cpu"

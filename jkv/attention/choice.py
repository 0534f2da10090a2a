"""Which implementation: by the platform that a program is compiled for, or by name."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Constants, Requests
from jkv.attention.kernel import backend
from jkv.attention.kernel.backend import MISSING
from jkv.attention.kernel.forward import attend_kernel
from jkv.attention.kernel.tuning import (
    Tile,
    Tuning,
    find_target,
    find_tuning,
    why_never,
    why_not,
)
from jkv.attention.pools import Pools
from jkv.attention.reference import attend_reference
from jkv.attention.xla.forward import attend_xla

Attend = Callable[..., tuple[jax.Array, jax.Array]]


# Platforms with a kernel, as JAX names what it lowers for.
_KERNEL_PLATFORMS = ("rocm", "cuda")


# Interpreting is for checking numbers: small tiles, to have several of everything.
_INTERPRETED = Tuning(
    decode=Tile(rows=16, tokens=16, num_warps=1, num_stages=1),
    prefill=Tile(rows=32, tokens=16, num_warps=1, num_stages=1, has_full_loop=True),
    programs=16,
)


def choose(implementation: str | None) -> Attend:
    """Return the implementation of that name; None is the one that always works.

    Raises:
      ValueError: for an unknown name.
    """
    if implementation not in _IMPLEMENTATIONS:
        names = ", ".join(repr(name) for name in _IMPLEMENTATIONS if name)
        raise ValueError(
            f"implementation must be None or one of {names}, got {implementation!r}"
        )
    return _IMPLEMENTATIONS[implementation]


def attend_anywhere(
    queries: jax.Array,  # [R, H, D]
    pools: Pools,
    layer: jax.Array,
    requests: Requests,
    *,
    constants: Constants,
    **options: jax.Array | None,  # scale, window, sinks
) -> tuple[jax.Array, jax.Array]:
    """Use the kernel on platforms where it applies, the plain path everywhere else.

    All of them are traced, one is lowered: a program that was exported for several
    platforms carries several.
    """
    kernels = _kernels(queries, pools, constants)
    plain = functools.partial(_call, attend_xla, constants=constants)
    operands = (queries, pools, layer, requests, options)
    return lax.platform_dependent(*operands, default=plain, **kernels)


def attend_pallas(
    queries: jax.Array,  # [R, H, D]
    pools: Pools,
    layer: jax.Array,
    requests: Requests,
    *,
    constants: Constants,
    **options: jax.Array | None,  # scale, window, sinks
) -> tuple[jax.Array, jax.Array]:
    """Use the kernel, interpreted on CPU.

    Raises:
      NotImplementedError: for shapes it does not take, saying why.
    """
    reason = MISSING or why_never(queries, pools)
    for platform in _KERNEL_PLATFORMS:
        target = find_target(platform)
        if reason is None and target is not None:
            reason = why_not(queries, pools, platform, target)
    if reason is not None:
        raise NotImplementedError(
            f"implementation='pallas' does not apply: {reason}; leave implementation "
            "out to have the plain path in such a case"
        )
    interpreted = functools.partial(
        _call,
        attend_kernel,
        constants=constants,
        tuning=_INTERPRETED,
        interpret=True,
    )
    kernels = _kernels(queries, pools, constants)
    results = (
        jax.ShapeDtypeStruct((*queries.shape[:2], pools.value_dim), queries.dtype),
        jax.ShapeDtypeStruct(queries.shape[:2], jnp.float32),
    )

    def refuse(*operands: object) -> tuple[jax.Array, jax.Array]:
        output, lse = backend.refuse(
            "implementation='pallas' has no tile for these shapes and dtypes on every "
            "card of the platform that this program is lowered for",
            *results,
        )
        return output, lse

    operands = (queries, pools, layer, requests, options)
    return lax.platform_dependent(*operands, cpu=interpreted, **kernels, default=refuse)


def _kernels(
    queries: jax.Array, pools: Pools, constants: Constants
) -> dict[str, Attend]:
    """Return the kernel for each platform where it applies, tuned for the card at hand
    or, where there is none, for any.
    """
    if MISSING or why_never(queries, pools):
        return {}
    kernels: dict[str, Attend] = {}
    for platform in _KERNEL_PLATFORMS:
        tuning = find_tuning(queries, pools, platform, find_target(platform))
        if tuning is not None:
            kernels[platform] = functools.partial(
                _call,
                attend_kernel,
                constants=constants,
                tuning=tuning,
                interpret=False,
            )
    return kernels


def _call(
    attend: Attend,
    queries: jax.Array,
    pools: Pools,
    layer: jax.Array,
    requests: Requests,
    options: dict[str, jax.Array | None],
    **static: object,
) -> tuple[jax.Array, jax.Array]:
    return attend(queries, pools, layer, requests, **options, **static)


_IMPLEMENTATIONS: dict[str | None, Attend] = {
    None: attend_anywhere,
    "xla": attend_xla,
    "reference": attend_reference,
    "pallas": attend_pallas,
}

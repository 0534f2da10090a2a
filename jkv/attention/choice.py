"""Which implementation: by the platform that a program is compiled for, or by name.

An implementation is a function of a `Call`. A new one is a folder beside `xla/` and
`kernel/`, and a row here: in `_KERNELS` if it serves a platform where it can, in
`_IMPLEMENTATIONS` if it can be asked for by name.
"""

import functools
from collections.abc import Callable

import jax
from jax import lax

from jkv.attention.call import Attend, Call
from jkv.attention.kernel import backend
from jkv.attention.kernel.platforms import find_kernel, interpret_kernel, why_refused
from jkv.attention.reference import attend_reference
from jkv.attention.xla.by_position import attend_by_position
from jkv.attention.xla.gradients import attend_differentiably
from jkv.attention.xla.plain_path import attend_plainly, attend_xla
from jkv.sharding.varying import is_manual, vary_over, varying_axes

# Platforms with a kernel, as JAX names what it lowers for, and what finds the one for a
# call: None where the kernel does not take it.
_KERNELS: dict[str, Callable[..., Attend | None]] = {
    "rocm": find_kernel,
    "cuda": find_kernel,
}


def choose(implementation: str | None, *, by_position: bool) -> Attend:
    """Return the implementation of that name; None is the one that always works.

    Raises:
      ValueError: for an unknown name, or one whose bits depend on more than positions.
    """
    if implementation not in _IMPLEMENTATIONS:
        names = ", ".join(repr(name) for name in _IMPLEMENTATIONS if name)
        raise ValueError(
            f"implementation must be None or one of {names}, got {implementation!r}"
        )
    if not by_position:
        return _IMPLEMENTATIONS[implementation]
    if implementation not in _BY_POSITION:
        raise ValueError(
            f"implementation={implementation!r} adds a context up in an order that "
            f"depends on the step; leave it out where bits shall not"
        )
    return _BY_POSITION[implementation]


def attend_anywhere(
    call: Call, *, by_position: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Use the kernel on platforms where it applies, the plain path everywhere else.

    A program for one platform carries one of them, one that was exported for several
    platforms carries several.
    """
    plain = attend_by_position if by_position else attend_plainly
    return _choose_platform(call, default=plain, **_find_kernels(call, by_position))


def attend_pallas(
    call: Call, *, by_position: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Use the kernel, interpreted on CPU.

    Raises:
      NotImplementedError: for shapes it does not take, saying why.
    """
    reason = why_refused(call, tuple(_KERNELS))
    if reason is not None:
        raise NotImplementedError(
            f"implementation='pallas' does not apply: {reason}; leave implementation "
            "out to have the plain path in such a case"
        )
    return _choose_platform(
        call,
        cpu=functools.partial(interpret_kernel, by_position=by_position),
        default=_refuse_platform,
        **_find_kernels(call, by_position),
    )


def _choose_platform(call: Call, **attends: Attend) -> tuple[jax.Array, jax.Array]:
    """Return what the implementation for the platform does with the call.

    Inside `shard_map` all of them must answer with what varies over the same axes.
    """
    if is_manual():
        attends = {
            platform: functools.partial(_attend_varying, attend)
            for platform, attend in attends.items()
        }
    return lax.platform_dependent(call, **attends)


def _attend_varying(attend: Attend, call: Call) -> tuple[jax.Array, jax.Array]:
    """Attend; the results vary over all axes that anything in the call varies over."""
    return vary_over(attend(call), varying_axes(call))


def _find_kernels(call: Call, by_position: bool) -> dict[str, Attend]:
    """Return the kernel for each platform where there is one for this call."""
    found = {
        platform: find(call, platform, by_position=by_position)
        for platform, find in _KERNELS.items()
    }
    return {platform: kernel for platform, kernel in found.items() if kernel}


def _refuse_platform(call: Call) -> tuple[jax.Array, jax.Array]:
    """Raise NotImplementedError when a program comes to be lowered for this."""
    output, lse = backend.refuse(
        "implementation='pallas' has no tile for these shapes and dtypes on every "
        "card of the platform that this program is lowered for",
        *call.results,
    )
    return output, lse


_IMPLEMENTATIONS: dict[str | None, Attend] = {
    None: functools.partial(attend_differentiably, attend_anywhere),
    "xla": functools.partial(attend_differentiably, attend_xla),
    # Differentiable as it stands, so that it can judge the others' derivative.
    "reference": attend_reference,
    "pallas": functools.partial(attend_differentiably, attend_pallas),
}
# Those whose bits depend on a row's position alone.
_BY_POSITION: dict[str | None, Attend] = {
    None: functools.partial(
        attend_differentiably, functools.partial(attend_anywhere, by_position=True)
    ),
    "xla": functools.partial(attend_differentiably, attend_by_position),
    "pallas": functools.partial(
        attend_differentiably, functools.partial(attend_pallas, by_position=True)
    ),
}

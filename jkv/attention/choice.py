"""Which implementation: by the platform that a program is compiled for, or by name.

An implementation is a function of a `Call`, and one of its derivative. A new one is a
folder beside `xla/` and `kernel/`, and its functions here: in what serves anywhere if
they serve a platform where they can, in `_IMPLEMENTATIONS` if it can be asked for by
name.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax

from jkv.attention.call import Attend, Call
from jkv.attention.contiguous.cudnn import attend_by_cudnn
from jkv.attention.contiguous.cudnn import why_refused as why_not_by_cudnn
from jkv.attention.contiguous.prompts import attend_prompts
from jkv.attention.derivative import (
    Cotangents,
    Differentiate,
    Gradients,
    Implementation,
    attend_differentiably,
    shape_gradients,
)
from jkv.attention.kernel import backend
from jkv.attention.kernel.platforms import (
    Store,
    find_derivative,
    find_kernel,
    find_store,
    interpret_derivative,
    interpret_kernel,
    why_differentiated_plainly,
    why_not_derived,
    why_plain,
    why_refused,
)
from jkv.attention.pools import Pools
from jkv.attention.reference import attend_reference
from jkv.attention.slots import SlotWrite, scatter, scatter_by_head
from jkv.attention.xla.by_position import attend_by_position
from jkv.attention.xla.gradients import differentiate_plainly
from jkv.attention.xla.plain_path import attend_plainly, attend_xla
from jkv.sharding.varying import is_manual, vary_over, varying_axes

Results = TypeVar("Results")

# Platforms with kernels, as JAX names what it lowers for, and what finds the one for a
# call, for its derivative, and for rows to store: None where the kernel does not take
# it.
_KERNELS: dict[str, Callable[..., Attend | None]] = {
    "rocm": find_kernel,
    "cuda": find_kernel,
}
_DERIVATIVES: dict[str, Callable[..., Differentiate | None]] = {
    "rocm": find_derivative,
    "cuda": find_derivative,
}
_STORES: dict[str, Callable[..., Store | None]] = {
    "rocm": find_store,
    "cuda": find_store,
}


def choose(
    implementation: str | None, *, by_position: bool, return_lse: bool
) -> Attend:
    """Return the implementation of that name; None is the one that always works.

    Raises:
      ValueError: for an unknown name, or one whose bits depend on more than positions.
      NotImplementedError: for one that has no log-sum-exp to return.
    """
    if implementation not in _IMPLEMENTATIONS:
        names = ", ".join(repr(name) for name in _IMPLEMENTATIONS if name)
        raise ValueError(
            f"implementation must be None or one of {names}, got {implementation!r}"
        )
    if return_lse and implementation in CONTIGUOUS:
        raise NotImplementedError(
            f"implementation={implementation!r} has no float32 log-sum-exp of a "
            f"prompt, which return_lse asks for, and so does a cache whose blocks are "
            f"spread over devices: leave implementation out"
        )
    if not by_position:
        return _IMPLEMENTATIONS[implementation]
    if implementation not in _BY_POSITION:
        raise ValueError(
            f"implementation={implementation!r} adds a context up in an order that "
            f"depends on the step; leave it out where bits shall not"
        )
    return _BY_POSITION[implementation]


class PlainReasons(NamedTuple):
    """Why the plain path serves a call on a card; None where a kernel does."""

    forward: str | None
    derivative: str | None


def explain_choice(
    queries: jax.Array, pools: Pools, platform: str, target: str | None
) -> PlainReasons:
    """Say which way a call goes on a card, by position or not, and its derivative.

    Args:
      queries: [R, H, D]; only shape and dtype matter.
      pools: likewise.
      platform: as JAX names what it lowers for: "rocm", "cuda", "cpu".
      target: the card, such as "gfx942" or "sm_90"; None for one that is not known.
    """
    if platform not in _KERNELS:
        reason = f"there are kernels for {' and '.join(_KERNELS)}, not for {platform}"
        return PlainReasons(reason, reason)
    given = queries, pools, platform, target
    return PlainReasons(why_plain(*given), why_differentiated_plainly(*given))


def attend_anywhere(
    call: Call, *, by_position: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Use the kernel on platforms where it applies, the plain path everywhere else.

    A program for one platform carries one of them, one that was exported for several
    platforms carries several.
    """
    plain = attend_by_position if by_position else attend_plainly
    kernels = _find(_KERNELS, call, by_position=by_position)
    return _choose_platform(call, default=plain, **kernels)


def differentiate_anywhere(call: Call, cotangents: Cotangents) -> Gradients:
    """Use the derivative's kernels likewise, whatever computed the result."""
    kernels = _find(_DERIVATIVES, call)
    default = differentiate_plainly
    return _choose_platform(call, cotangents, default=default, **kernels)


def find_stores(arrays: dict[str, jax.Array]) -> dict[str, Store]:
    """Return what stores rows on the platform of the card at hand, if a kernel does.

    Args:
      arrays: as `SlotWrite` has them; only shapes and dtypes matter.
    """
    return _find(_STORES, arrays)


def store(write: SlotWrite, stores: Mapping[str, Store]) -> dict[str, jax.Array]:
    """Store rows by these kernels on their platforms, by scatters everywhere else.

    Where derivatives go through the rows or the arrays, scatters store them everywhere.
    """
    return _store(stores, write) if stores else _scatter_anywhere(write)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _store(stores: Mapping[str, Store], write: SlotWrite) -> dict[str, jax.Array]:
    return _choose_platform(write, **_SCATTERS, **stores)


@_store.defjvp
def _differentiate_scatters(
    stores: Mapping[str, Store], primals: Any, tangents: Any
) -> Any:
    """Leave it to JAX, which knows the derivative of a scatter, forward and back."""
    del stores
    return jax.jvp(_scatter_anywhere, primals, tangents)


def _scatter_anywhere(write: SlotWrite) -> dict[str, jax.Array]:
    return _choose_platform(write, **_SCATTERS)


_SCATTERS = {"default": scatter, "tpu": scatter_by_head}


def attend_pallas(
    call: Call, *, by_position: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Use the kernel, interpreted on CPU.

    Raises:
      NotImplementedError: for shapes it does not take, saying why.
    """
    _raise_refusal("pallas", why_refused(call, tuple(_KERNELS)))
    refuse = functools.partial(_refuse_platform, _NO_TILE, call.results)
    kernels = _find(_KERNELS, call, by_position=by_position)
    interpret = functools.partial(interpret_kernel, by_position=by_position)
    return _choose_platform(call, cpu=interpret, default=refuse, **kernels)


def differentiate_pallas(call: Call, cotangents: Cotangents) -> Gradients:
    """Use the derivative's kernels, interpreted on CPU.

    Raises:
      NotImplementedError: for shapes they do not take, saying why.
    """
    _raise_refusal("pallas", why_not_derived(call, tuple(_DERIVATIVES)))
    refuse = functools.partial(_refuse_platform, _NO_TILE, shape_gradients(call))
    kernels = _find(_DERIVATIVES, call)
    interpret = interpret_derivative
    return _choose_platform(call, cotangents, cpu=interpret, default=refuse, **kernels)


def attend_cudnn(call: Call) -> tuple[jax.Array, jax.Array]:
    """Use cuDNN for a long prompt without a past, the kernel for all other rows.

    Raises:
      NotImplementedError: for what cuDNN does not take, saying why.
    """
    _raise_refusal("cudnn", why_not_by_cudnn(call))
    serve = functools.partial(
        attend_prompts, attend=attend_anywhere, attend_contiguous=attend_by_cudnn
    )
    refuse = functools.partial(_refuse_platform, _NO_CUDA, call.results)
    return _choose_platform(call, cuda=serve, default=refuse)


def _raise_refusal(implementation: str, reason: str | None) -> None:
    if reason is not None:
        raise NotImplementedError(
            f"implementation={implementation!r} does not apply: {reason}; leave "
            f"implementation out to have what applies in such a case"
        )


# Why a program cannot be lowered for some platform.
_NO_TILE = (
    "implementation='pallas' has no tile for these shapes and dtypes on every card of "
    "the platform that this program is lowered for"
)
_NO_CUDA = (
    "implementation='cudnn' is for CUDA alone: leave implementation out of programs "
    "for other platforms"
)


def _choose_platform(*given: Any, **functions: Callable[..., Results]) -> Results:
    """Return what the function for the platform makes of what is given.

    Inside `shard_map` all of them must answer with what varies over the same axes.
    """
    if is_manual():
        functions = {
            platform: functools.partial(_call_varying, function)
            for platform, function in functions.items()
        }
    chosen: Results = lax.platform_dependent(*given, **functions)
    return chosen


def _call_varying(function: Callable[..., Results], *given: Any) -> Results:
    """Call; the results vary over all axes that anything given varies over."""
    return vary_over(function(*given), varying_axes(given))


def _find(
    finders: Mapping[str, Callable[..., Callable[..., Results] | None]],
    given: Call | dict[str, jax.Array],
    **options: bool,
) -> dict[str, Callable[..., Results]]:
    """Return the kernel for each platform where there is one for what is given."""
    found = {
        platform: find(given, platform, **options) for platform, find in finders.items()
    }
    return {platform: kernel for platform, kernel in found.items() if kernel}


def _refuse_platform(reason: str, shapes: Any, *given: Any) -> Any:
    """Raise NotImplementedError when a program comes to be lowered for this."""
    del given
    leaves, structure = jax.tree.flatten(shapes)
    refused = backend.refuse(reason, *leaves)
    return jax.tree.unflatten(structure, refused)


def _with_derivative(
    attend: Attend, differentiate: Differentiate, attend_only: Attend | None = None
) -> Attend:
    implementation = Implementation(attend, differentiate, attend_only)
    return functools.partial(attend_differentiably, implementation)


_IMPLEMENTATIONS: dict[str | None, Attend] = {
    None: _with_derivative(attend_anywhere, differentiate_anywhere),
    "xla": _with_derivative(attend_xla, differentiate_plainly),
    # Differentiable as it stands, so that it can judge the others' derivative.
    "reference": attend_reference,
    "pallas": _with_derivative(attend_pallas, differentiate_pallas),
    "cudnn": _with_derivative(attend_anywhere, differentiate_anywhere, attend_cudnn),
}
# Those that take prompts side by side, with a scale that is compiled in, and give no
# log-sum-exp.
CONTIGUOUS = frozenset({"cudnn"})
# Those whose bits depend on a row's position alone.
_BY_POSITION: dict[str | None, Attend] = {
    None: _with_derivative(
        functools.partial(attend_anywhere, by_position=True), differentiate_anywhere
    ),
    "xla": _with_derivative(attend_by_position, differentiate_plainly),
    "pallas": _with_derivative(
        functools.partial(attend_pallas, by_position=True), differentiate_pallas
    ),
}

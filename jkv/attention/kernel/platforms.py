"""Which calls the kernels take on which platform, and with what tiles.

What `jkv.attention.choice` asks of a kernel: the function of a call that serves it on a
platform, or the reason why there is none; and the same for its derivative.
"""

import functools
from collections.abc import Callable

import jax

from jkv.attention.call import Attend, Call
from jkv.attention.derivative import Cotangents, Differentiate, Gradients
from jkv.attention.kernel import backend
from jkv.attention.kernel.by_position import attend_kernel_by_position
from jkv.attention.kernel.derivative import differentiate_kernel
from jkv.attention.kernel.launches import attend_kernel
from jkv.attention.kernel.slots import store_rows, why_scattered
from jkv.attention.kernel.table import Backward, Tile, Tuning
from jkv.attention.kernel.tuning import (
    find_backward,
    find_family,
    find_target,
    find_tuning,
    why_never,
    why_no_derivative,
    why_no_tile,
    why_not,
)
from jkv.attention.pools import Pools
from jkv.attention.slots import SlotWrite

Store = Callable[[SlotWrite], dict[str, jax.Array]]

# Interpreting is for checking numbers: small tiles, to have several of everything.
_INTERPRETED = Tuning(
    decode=Tile(rows=16, tokens=16, num_warps=1, num_stages=1),
    prefill=Tile(rows=32, tokens=16, num_warps=1, num_stages=1, has_full_loop=True),
    programs=16,
    piece_tokens=16,
    max_pieces=8,
)


_INTERPRETED_BACKWARD = Backward(
    576,
    queries=Tile(rows=32, tokens=16, num_warps=1, num_stages=1),
    tokens=Tile(rows=32, tokens=32, num_warps=1, num_stages=1),
)


def find_kernel(
    call: Call, platform: str, *, by_position: bool = False
) -> Attend | None:
    """Return the kernel tuned for the card at hand or, without one, for any card.

    Args:
      call: only shapes and dtypes matter.
      platform: "rocm" or "cuda".
      by_position: whether bits may depend on a row's position alone.

    Returns:
      None where the plain path must serve.
    """
    target = find_target(platform)
    if why_plain(call.queries, call.pools, platform, target):
        return None
    tuning = find_tuning(call.queries, call.pools, platform, target)
    assert tuning is not None  # or there was a reason
    attend = attend_kernel_by_position if by_position else attend_kernel
    return functools.partial(attend, tuning=tuning, interpret=False)


def find_derivative(call: Call, platform: str) -> Differentiate | None:
    """Return the derivative's kernels, as `find_kernel` does the result's."""
    target = find_target(platform)
    if why_differentiated_plainly(call.queries, call.pools, platform, target):
        return None
    tuning = find_backward(call.queries, call.pools, platform, target)
    assert tuning is not None  # or there was a reason
    return functools.partial(differentiate_kernel, tuning=tuning, interpret=False)


def find_store(arrays: dict[str, jax.Array], platform: str) -> Store | None:
    """Return the kernel that stores rows, for the card at hand.

    Args:
      arrays: as `SlotWrite` has them; only shapes and dtypes matter.
      platform: "rocm" or "cuda".

    Returns:
      None where scatters must serve, and where no card of the platform is at hand.
    """
    target = find_target(platform)
    if target is None or why_scatter(arrays, platform, target):
        return None
    return functools.partial(store_rows, interpret=False)


def why_scatter(arrays: dict[str, jax.Array], platform: str, target: str) -> str | None:
    """Say why scatters store rows on a card, None if the kernel does."""
    if find_family(platform, target) is None:
        return f"there are no kernels for {target}"
    return backend.why_missing() or why_scattered(arrays)


def why_plain(
    queries: jax.Array, pools: Pools, platform: str, target: str | None
) -> str | None:
    """Say why the plain path serves a call on a card, None if the kernel does.

    Args:
      queries: [R, H, D]; only shape and dtype matter.
      pools: likewise.
      platform: "rocm" or "cuda".
      target: as `find_target` names it, None for a card that is not known.
    """
    return _why_no_backend(target) or why_not(queries, pools, platform, target)


def why_differentiated_plainly(
    queries: jax.Array, pools: Pools, platform: str, target: str | None
) -> str | None:
    """Say the same of its derivative."""
    return _why_no_backend(target) or why_no_tile(queries, pools, platform, target)


def _why_no_backend(target: str | None) -> str | None:
    if target is not None:
        return backend.why_missing()
    # Without a card the kernel may be lowered elsewhere or, as mostly, never.
    return None if backend.is_installed() else "this JAX has no Pallas for GPUs"


def interpret_kernel(
    call: Call, *, by_position: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel operation by operation, on a CPU."""
    attend = attend_kernel_by_position if by_position else attend_kernel
    return attend(call, tuning=_INTERPRETED, interpret=True)


def interpret_derivative(call: Call, cotangents: Cotangents) -> Gradients:
    """Run the kernels of the derivative operation by operation, on a CPU."""
    tuning = _INTERPRETED_BACKWARD
    return differentiate_kernel(call, cotangents, tuning=tuning, interpret=True)


def why_refused(call: Call, platforms: tuple[str, ...]) -> str | None:
    """Say why the kernel cannot serve a call here, None if it may.

    Without a card the answer comes when the program is lowered for one.
    """
    reason = backend.why_missing() or why_never(call.queries, call.pools)
    for platform in platforms:
        target = find_target(platform)
        if reason is None and target is not None:
            reason = why_not(call.queries, call.pools, platform, target)
    return reason


def why_not_derived(call: Call, platforms: tuple[str, ...]) -> str | None:
    """Say why the kernels cannot serve its derivative here, None if they may."""
    reason = backend.why_missing() or why_no_derivative(call.queries, call.pools)
    for platform in platforms:
        target = find_target(platform)
        if reason is None and target is not None:
            reason = why_no_tile(call.queries, call.pools, platform, target)
    return reason

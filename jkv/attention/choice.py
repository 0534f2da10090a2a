"""Selection of a backend, by platform or by name, and its derivative.

A derivative is computed by the backend selected for it, and is independent of the one
that computed the result. As in FlashAttention (arXiv 2205.14135, appendix B) only the
result and its log-sum-exp are saved; weights are recomputed from the scores. The
softmax term `delta` and the cotangents of sinks and scale are computed here, those of
queries, keys and values by the backend.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import (
    DEFAULT,
    Backend,
    Call,
    Cotangents,
    DeviceType,
    Gradients,
    Past,
    Pools,
    Refusal,
    Requests,
    SlotWrite,
    StepShape,
    call_of,
    find_device,
)
from jkv.attention.cudnn import Cudnn
from jkv.attention.kernel.interface import Pallas, Triton
from jkv.attention.reference import Reference
from jkv.attention.xla.interface import SideBySide, Xla
from jkv.operations import is_manual, vary_over, varying_axes

_PAGED: tuple[Backend, ...] = (Pallas(), Triton(), SideBySide(), Xla())

# In order of preference: a platform's default is the first backend that supports the
# call.
BACKENDS: tuple[Backend, ...] = (*_PAGED, Cudnn(_PAGED), Reference())

Results = TypeVar("Results")


WhyNot = Callable[[Backend, DeviceType], str | None]


Store = Callable[[SlotWrite], dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The named backend, or the candidates of a default choice."""

    backends: tuple[Backend, ...]
    named: Backend | None

    def serve(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """Compute attention with a custom derivative."""
        if self.named is not None and self.named.is_differentiable:
            return self.attend(call)
        return attend_differentiably(self, call)

    def attend(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """Compute attention with the backend of each lowering platform.

        A program for one platform contains one backend; a program exported for several
        platforms contains several.
        """
        return self._attend(self.named, call)

    def attend_with_lse(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """Compute attention with backends that return a log-sum-exp."""
        return Choice(self._with_lse, self._named_with_lse).attend(call)

    def differentiate(self, call: Call, cotangents: Cotangents) -> Gradients:
        """Compute the gradients, independently of the backend of the result."""
        named, backends = self._named_with_lse, self._with_lse
        found = _find(
            named, backends, lambda one, device: one.why_not_derived(call, device)
        )
        return choose_platform(call, cotangents, **_on_cards(found, "differentiate"))

    def _attend(self, named: Backend | None, call: Call) -> tuple[jax.Array, jax.Array]:
        backends = self.backends
        if call.by_position:
            backends = tuple(one for one in backends if one.is_by_position)
        found = _find(named, backends, lambda one, device: one.why_not(call, device))
        return choose_platform(call, **_on_cards(found, "attend"))

    @property
    def _with_lse(self) -> tuple[Backend, ...]:
        return tuple(one for one in self.backends if one.has_lse)

    @property
    def _named_with_lse(self) -> Backend | None:
        return self.named if self.named is not None and self.named.has_lse else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(choice: Choice, call: Call) -> tuple[jax.Array, jax.Array]:
    """Compute attention with any backend, differentiable or not."""
    return choice.attend(call)


@functools.partial(jax.jit, static_argnums=0)
def attend_differentiably(choice: Choice, call: Call) -> tuple[jax.Array, jax.Array]:
    """Compute attention with a custom derivative.

    Jitted, so that calls of equal shapes, dtypes and static fields are traced and
    lowered once, and an eager backward pass is compiled. Inside `shard_map`, a gradient
    varies over all axes that any argument varies over; the arguments are made to vary
    likewise, which sums the gradients of replicated ones.
    """
    if is_manual():
        call = vary_over(call, varying_axes(call))
    return _attend(choice, call)


def _forward(choice, call):  # type: ignore[no-untyped-def]
    output, lse = choice.attend_with_lse(call)
    return (output, lse), (call, output, lse)


def _backward(choice, saved, cotangents):  # type: ignore[no-untyped-def]
    call, output, lse = saved
    d_output, d_lse = cotangents
    delta = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    delta -= d_lse
    grads = choice.differentiate(call, Cotangents(d_output, lse, delta))
    # Rows that attend to no token may hold NaN, and 0 * NaN is NaN.
    sees = ~jnp.isneginf(lse)
    of_scale = grads.queries * call.queries.astype(jnp.float32)
    # None for fields without a gradient: integers, raw bits, scales of tokens.
    gradient = dataclasses.replace(
        call,
        queries=(grads.queries * call.scale).astype(call.queries.dtype),
        pools=dataclasses.replace(
            call.pools,
            keys=grads.keys,
            values=grads.values,
            key_scales=None,
            value_scales=None,
        ),
        scale=jnp.sum(jnp.where(sees[..., None], of_scale, 0.0)),
        sinks=_differentiate_sinks(call.sinks, lse, delta),
        layer=None,
        requests=None,
        window=None,
        part=None,
        past=None,
        plans=None,
    )
    return (gradient,)


_attend.defvjp(_forward, _backward)


def _differentiate_sinks(
    sinks: jax.Array | None,  # f32[H]
    lse: jax.Array,  # f32[R, H]
    delta: jax.Array,  # f32[R, H]
) -> jax.Array | None:
    """Return the gradient of the sinks, each a token with the value zero."""
    if sinks is None:
        return None
    each = jnp.exp(sinks[None] - lse) * delta
    return -jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, each), axis=0)


def choose(
    implementation: str | None,
    *,
    by_position: bool,
    return_lse: bool,
    scale: jax.typing.ArrayLike,
) -> Choice:
    """Return the named backend, or the candidates of the default choice for None.

    Raises:
      ValueError: an unknown name, or by_position with a backend without it.
      NotImplementedError: return_lse with a backend without a log-sum-exp.
    """
    known = float(scale) if isinstance(scale, int | float) else None
    if implementation is None:
        # A backend without a log-sum-exp is for some calls alone and comes first there.
        backends = sorted(BACKENDS, key=lambda one: one.has_lse)
        return Choice(
            tuple(
                one.with_scale(known, is_named=False)
                for one in backends
                if one.has_lse or not return_lse
            ),
            None,
        )
    named = {backend.name: backend for backend in BACKENDS}
    if implementation not in named:
        names = ", ".join(map(repr, named))
        raise ValueError(
            f"implementation must be None or one of {names}, got {implementation!r}"
        )
    backend = named[implementation]
    if return_lse and not backend.has_lse:
        raise NotImplementedError(
            f"implementation={implementation!r} returns no float32 log-sum-exp, which "
            f"return_lse and caches with blocks sharded over devices need; omit "
            f"implementation"
        )
    if by_position and not backend.is_by_position:
        raise ValueError(
            f"implementation={implementation!r} is not batch-invariant: its order of "
            f"summation depends on the step; omit implementation or by_position"
        )
    return Choice(BACKENDS, backend.with_scale(known))


def plan(
    pools: Pools,
    requests: Requests,
    reference_counts: jax.Array,
    step: StepShape,
    past: Past | None = None,
) -> dict[str, Any]:
    """Return the plans of all backends for a step, by name."""
    given = pools, requests, reference_counts, step, past
    found = {one.name: one.plan(*given) for one in BACKENDS}
    return {name: made for name, made in found.items() if made is not None}


class FallbackReasons(NamedTuple):
    """The reasons for plain XLA on a device; None where a kernel is used."""

    forward: str | None
    derivative: str | None


def explain_choice(
    queries: jax.Array,  # [R, H, D]; only shape and dtype are used
    pools: Pools,
    device: DeviceType,  # not of the platform DEFAULT
) -> FallbackReasons:
    """Return the reasons for plain XLA in a call and in its derivative."""
    call = call_of(queries, pools)
    # A backend for prompts alone leaves all other rows to these.
    kernels = [one for one in BACKENDS if one.has_lse]
    candidates = [one for one in kernels if device.platform in one.default_platforms]
    if not candidates:
        known = [
            name for one in kernels for name in one.default_platforms if name != DEFAULT
        ]
        names = " and ".join(dict.fromkeys(known))
        reason = f"there are kernels for {names}, not for {device.platform}"
        return FallbackReasons(reason, reason)
    return FallbackReasons(
        _join_reasons([one.why_not(call, device) for one in candidates]),
        _join_reasons([one.why_not_derived(call, device) for one in candidates]),
    )


def _join_reasons(reasons: list[str | None]) -> str | None:
    known = [reason for reason in reasons if reason is not None]
    return "; ".join(known) if len(known) == len(reasons) else None


def find_stores(
    write: SlotWrite,  # only formats, shapes and dtypes are used
) -> dict[str, Store]:
    """Return the store kernel of each platform that has one."""
    found = find_first(BACKENDS, lambda one, device: one.why_not_stored(write, device))
    return _on_cards(found, "store")


def store(write: SlotWrite, stores: Mapping[str, Store]) -> dict[str, jax.Array]:
    """Store rows with the given kernels, and with scatters on other platforms.

    Differentiated calls use scatters on all platforms.
    """
    return _store(stores, write) if stores else _scatter_anywhere(write)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _store(stores: Mapping[str, Store], write: SlotWrite) -> dict[str, jax.Array]:
    return choose_platform(write, **_SCATTERS, **stores)


@_store.defjvp
def _differentiate_scatters(
    stores: Mapping[str, Store], primals: Any, tangents: Any
) -> Any:
    """Differentiate the equivalent scatter, for which JAX has rules."""
    del stores
    return jax.jvp(_scatter_anywhere, primals, tangents)


def _scatter_anywhere(write: SlotWrite) -> dict[str, jax.Array]:
    return choose_platform(write, **_SCATTERS)


def scatter(write: SlotWrite) -> dict[str, jax.Array]:
    """Store the rows with one scatter per array."""
    block_ids, offsets = _locate(write)
    return _scatter(write, (block_ids, slice(None), offsets))


def scatter_by_head(write: SlotWrite) -> dict[str, jax.Array]:
    """Store the rows with one update per kv head of a row.

    TPUs tile the last two axes. A scatter of several heads moves the head axis beside
    the elements, which copies the pool twice.
    """
    block_ids, offsets = (each[:, None] for each in _locate(write))
    heads = jnp.arange(write.pool.shape[2], dtype=jnp.int32)
    return _scatter(write, (block_ids, heads, offsets))


def _locate(write: SlotWrite) -> tuple[jax.Array, jax.Array]:
    """Return each row's block and offset in it, i32[R]; N or more for no slot."""
    import chex  # importing it takes longer than importing jkv

    chex.assert_equal_shape([write.block_ids, write.offsets, write.valid])
    num_blocks, size = write.pool.shape[1], write.pool.shape[3]
    offsets, valid = write.offsets, write.valid
    if write.part is not None:
        offsets = offsets - write.part * size
        valid = valid & (offsets >= 0) & (offsets < size)
        offsets = jnp.where(valid, offsets, 0)
    # Rows without a slot get distinct indices past the end, so that `unique_indices`
    # holds, which accelerators need for a parallel scatter.
    past_end = num_blocks + jnp.arange(write.num_rows, dtype=jnp.int32)
    return jnp.where(valid & (write.layer >= 0), write.block_ids, past_end), offsets


def _scatter(write: SlotWrite, index: tuple[Any, ...]) -> dict[str, jax.Array]:
    bits, stored = write.rows_as_bits(), {}
    for name, array in write.arrays.items():
        slots = array.at[write.layer, *index]
        stored[name] = slots.set(bits[name], mode="drop", unique_indices=True)
    return stored


_SCATTERS = {DEFAULT: scatter, "tpu": scatter_by_head}


def _find(
    named: Backend | None, backends: tuple[Backend, ...], why_not: WhyNot
) -> dict[str, Backend]:
    """Return the backend of each platform."""
    if named is not None:
        return _insist(named, why_not)
    return find_first(backends, why_not)


def find_first(backends: tuple[Backend, ...], why_not: WhyNot) -> dict[str, Backend]:
    """Return the first backend that supports the call, for each platform.

    Platforms that use the backend of DEFAULT have no entry.
    """
    names = [name for one in backends for name in one.default_platforms]
    found: dict[str, Backend] = {}
    for platform in dict.fromkeys((DEFAULT, *names)):
        device = find_device(platform)
        for one in backends:
            is_for_it = {platform, DEFAULT} & {*one.default_platforms}
            if is_for_it and why_not(one, device) is None:
                found[platform] = one
                break
    default = found.get(DEFAULT)
    return {p: one for p, one in found.items() if p == DEFAULT or one != default}


def _on_cards(found: dict[str, Backend], method: str) -> dict[str, Any]:
    """Return a method of each platform's backend, bound to the platform's target."""
    return {
        platform: functools.partial(getattr(one, method), device=find_device(platform))
        for platform, one in found.items()
    }


def _insist(named: Backend, why_not: WhyNot) -> dict[str, Backend]:
    """Return the backend for its platforms, and a `Refusal` for all others.

    Raises:
      NotImplementedError: the local GPU, or every platform, is not supported.
    """
    devices = [find_device(platform) for platform in named.platforms]
    reasons = {device: why_not(named, device) for device in devices}
    found: dict[str, Backend] = {}
    for device, reason in reasons.items():
        if reason is None:
            found[device.platform] = named
            continue
        message = (
            f"implementation={named.name!r} does not support this call: {reason}; omit "
            f"implementation to select a supported backend"
        )
        if device.target is not None or all(reasons.values()):
            raise NotImplementedError(message)
        found[device.platform] = Refusal(message)
    names = " and ".join(platform.upper() for platform in named.platforms)
    elsewhere = (
        f"implementation={named.name!r} supports {names} only; omit implementation in "
        f"programs for other platforms"
    )
    return {DEFAULT: Refusal(elsewhere)} | found


def choose_platform(*given: Any, **functions: Callable[..., Results]) -> Results:
    """Call the function for the current platform.

    Inside `shard_map` the results of all functions must vary over the same axes.
    """
    if is_manual():
        functions = {
            platform: functools.partial(_call_varying, function)
            for platform, function in functions.items()
        }
    chosen: Results = lax.platform_dependent(*given, **functions)
    return chosen


def _call_varying(function: Callable[..., Results], *given: Any) -> Results:
    """Call the function; its results vary over all axes of its arguments."""
    return vary_over(function(*given), varying_axes(given))

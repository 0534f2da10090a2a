"""Which backend: by the platform that a program is compiled for, or by name.

The derivative is that of whichever backend computed the result. As in FlashAttention
(arXiv 2205.14135, appendix B) nothing is kept but the result and its log-sum-exp: the
weights are computed anew from the scores. What the softmax couples is one number for
each row and head, `delta`, which is found here; so are the cotangents of sinks and of
the scale. Those of queries, keys and values are the backend's.
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
    Card,
    Cotangents,
    Gradients,
    Refusal,
    StepShape,
    find_card,
)
from jkv.attention.call import Call, Pools, Requests, call_of
from jkv.attention.cudnn import Cudnn
from jkv.attention.kernel.face import Pallas, Triton
from jkv.attention.reference import Reference
from jkv.attention.slots import SlotWrite, scatter, scatter_by_head
from jkv.attention.xla.face import SideBySide, Xla
from jkv.sharding.loops import is_manual, vary_over, varying_axes

_PAGED: tuple[Backend, ...] = (Pallas(), Triton(), SideBySide(), Xla())

# All that there are. Of those that are chosen unasked on a platform the first one is
# taken that has no reason against it.
_CUDNN = Cudnn(_PAGED)
BACKENDS: tuple[Backend, ...] = (_CUDNN, *_PAGED, Reference())

_SCATTERS = {DEFAULT: scatter, "tpu": scatter_by_head}


Results = TypeVar("Results")


WhyNot = Callable[[Backend, Card], str | None]


Store = Callable[[SlotWrite], dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Choice:
    """What attends: the backend that was named, or some that are chosen from."""

    backends: tuple[Backend, ...]
    named: Backend | None

    def serve(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """Attend, with a derivative."""
        if self.named is not None and self.named.is_differentiable:
            return self.attend(call)
        return attend_differentiably(self, call)

    def attend(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """Attend by it on each platform that the program is lowered for.

        A program for one platform carries one backend, one that was exported for
        several platforms carries several.
        """
        return self._attend(self.named, call)

    def attend_with_lse(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """Attend likewise, by others where it has no log-sum-exp."""
        return Choice(self._with_lse, self._named_with_lse).attend(call)

    def differentiate(self, call: Call, cotangents: Cotangents) -> Gradients:
        """Differentiate likewise, whatever computed the result."""
        named, backends = self._named_with_lse, self._with_lse
        found = _find(
            named, backends, lambda one, card: one.why_not_derived(call, card)
        )
        return choose_platform(call, cotangents, **_on_cards(found, "differentiate"))

    def _attend(self, named: Backend | None, call: Call) -> tuple[jax.Array, jax.Array]:
        backends = self.backends
        if call.by_position:
            backends = tuple(one for one in backends if one.is_by_position)
        found = _find(named, backends, lambda one, card: one.why_not(call, card))
        return choose_platform(call, **_on_cards(found, "attend"))

    @property
    def _with_lse(self) -> tuple[Backend, ...]:
        return tuple(one for one in self.backends if one.has_lse)

    @property
    def _named_with_lse(self) -> Backend | None:
        return self.named if self.named is not None and self.named.has_lse else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(choice: Choice, call: Call) -> tuple[jax.Array, jax.Array]:
    """Attend by what need not be differentiable itself."""
    return choice.attend(call)


@functools.partial(jax.jit, static_argnums=0)
def attend_differentiably(choice: Choice, call: Call) -> tuple[jax.Array, jax.Array]:
    """Attend, with a derivative that JAX is told.

    Jitted, so that calls of equal shapes, dtypes and static fields are traced and
    lowered once, and an eager backward pass is compiled. Inside `shard_map` a gradient
    varies over all axes that anything here varies over, so the arguments do too: what
    was the same on several devices has its gradient summed over them.
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
    # Rows that see nothing bring nothing, and may hold NaN: 0 * NaN is NaN.
    sees = ~jnp.isneginf(lse)
    of_scale = grads.queries * call.queries.astype(jnp.float32)
    # None stands for what has no gradient: integers, raw bits, scales of tokens.
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
        plans=None,
    )
    return (gradient,)


_attend.defvjp(_forward, _backward)


def _differentiate_sinks(
    sinks: jax.Array | None,  # f32[H]
    lse: jax.Array,  # f32[R, H]
    delta: jax.Array,  # f32[R, H]
) -> jax.Array | None:
    """A sink is a token with the value zero. Rows that see nothing have none."""
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
    """Return the backend of that name; None is the choice that always works.

    Raises:
      ValueError: for an unknown name, or one whose bits depend on more than positions.
      NotImplementedError: for one that has no log-sum-exp to return.
    """
    known = float(scale) if isinstance(scale, int | float) else None
    if implementation is None:
        if return_lse:
            return Choice(BACKENDS[1:], None)
        cudnn = _CUDNN.with_scale(known, is_named=False)
        return Choice((cudnn, *BACKENDS[1:]), None)
    named = {backend.name: backend for backend in BACKENDS}
    if implementation not in named:
        names = ", ".join(map(repr, named))
        raise ValueError(
            f"implementation must be None or one of {names}, got {implementation!r}"
        )
    backend = named[implementation]
    if return_lse and not backend.has_lse:
        raise NotImplementedError(
            f"implementation={implementation!r} has no float32 log-sum-exp of a "
            f"prompt, which return_lse asks for, and so does a cache whose blocks are "
            f"spread over devices: leave implementation out"
        )
    if by_position and not backend.is_by_position:
        raise ValueError(
            f"implementation={implementation!r} adds a context up in an order that "
            f"depends on the step; leave it out where bits shall not"
        )
    return Choice(BACKENDS, backend.with_scale(known))


def plan(
    pools: Pools, requests: Requests, reference_counts: jax.Array, step: StepShape
) -> dict[str, Any]:
    """Return what backends find out about a step once, by their names."""
    given = pools, requests, reference_counts, step
    found = {one.name: one.plan(*given) for one in BACKENDS}
    return {name: made for name, made in found.items() if made is not None}


class PlainReasons(NamedTuple):
    """Why the plain path serves a call on a card; None where a kernel does."""

    forward: str | None
    derivative: str | None


def explain_choice(
    queries: jax.Array,  # [R, H, D]; only shape and dtype matter
    pools: Pools,
    card: Card,  # of a platform that has a name
) -> PlainReasons:
    """Say which way a call goes on a card, by position or not, and its derivative."""
    call = call_of(queries, pools)
    # A backend for prompts alone leaves all other rows to these.
    kernels = [one for one in BACKENDS if one.has_lse]
    asked = [one for one in kernels if card.platform in one.unasked]
    if not asked:
        known = [name for one in kernels for name in one.unasked if name != DEFAULT]
        names = " and ".join(dict.fromkeys(known))
        reason = f"there are kernels for {names}, not for {card.platform}"
        return PlainReasons(reason, reason)
    return PlainReasons(
        _join_reasons([one.why_not(call, card) for one in asked]),
        _join_reasons([one.why_not_derived(call, card) for one in asked]),
    )


def _join_reasons(reasons: list[str | None]) -> str | None:
    known = [reason for reason in reasons if reason is not None]
    return "; ".join(known) if len(known) == len(reasons) else None


def find_stores(
    write: SlotWrite,  # of which only formats, shapes and dtypes matter
) -> dict[str, Store]:
    """Return what stores rows on the platform of the card at hand, if a kernel does."""
    found = find_first(BACKENDS, lambda one, card: one.why_not_stored(write, card))
    return _on_cards(found, "store")


def store(write: SlotWrite, stores: Mapping[str, Store]) -> dict[str, jax.Array]:
    """Store rows by these kernels on their platforms, by scatters everywhere else.

    Where derivatives go through the rows or the arrays, scatters store them everywhere.
    """
    return _store(stores, write) if stores else _scatter_anywhere(write)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _store(stores: Mapping[str, Store], write: SlotWrite) -> dict[str, jax.Array]:
    return choose_platform(write, **_SCATTERS, **stores)


@_store.defjvp
def _differentiate_scatters(
    stores: Mapping[str, Store], primals: Any, tangents: Any
) -> Any:
    """Leave it to JAX, which knows the derivative of a scatter, forward and back."""
    del stores
    return jax.jvp(_scatter_anywhere, primals, tangents)


def _scatter_anywhere(write: SlotWrite) -> dict[str, jax.Array]:
    return choose_platform(write, **_SCATTERS)


def _find(
    named: Backend | None, backends: tuple[Backend, ...], why_not: WhyNot
) -> dict[str, Backend]:
    """Return what serves each platform."""
    if named is not None:
        return _insist(named, why_not)
    return find_first(backends, why_not)


def find_first(backends: tuple[Backend, ...], why_not: WhyNot) -> dict[str, Backend]:
    """Return the first backend without a reason against it, for each platform.

    Where that is the one for all platforms, a platform has no entry of its own.
    """
    unasked = [platform for one in backends for platform in one.unasked]
    found: dict[str, Backend] = {}
    for platform in dict.fromkeys((DEFAULT, *unasked)):
        card = find_card(platform)
        for one in backends:
            is_for_it = {platform, DEFAULT} & {*one.unasked}
            if is_for_it and why_not(one, card) is None:
                found[platform] = one
                break
    default = found.get(DEFAULT)
    return {p: one for p, one in found.items() if p == DEFAULT or one != default}


def _on_cards(found: dict[str, Backend], method: str) -> dict[str, Any]:
    """Return a method of each platform's backend, told of the card."""
    return {
        platform: functools.partial(getattr(one, method), card=find_card(platform))
        for platform, one in found.items()
    }


def _insist(named: Backend, why_not: WhyNot) -> dict[str, Backend]:
    """Return the backend for all its platforms, and a refusal for what it cannot do.

    Raises:
      NotImplementedError: where it does not apply to the card at hand, or anywhere.
    """
    cards = [find_card(platform) for platform in named.platforms]
    reasons = {card: why_not(named, card) for card in cards}
    found: dict[str, Backend] = {}
    for card, reason in reasons.items():
        if reason is None:
            found[card.platform] = named
            continue
        told = (
            f"implementation={named.name!r} does not apply: {reason}; leave "
            f"implementation out to have what applies in such a case"
        )
        if card.target is not None or all(reasons.values()):
            raise NotImplementedError(told)
        found[card.platform] = Refusal(told)
    names = " and ".join(platform.upper() for platform in named.platforms)
    elsewhere = (
        f"implementation={named.name!r} is for {names} alone: leave implementation out "
        f"of programs for other platforms"
    )
    return {DEFAULT: Refusal(elsewhere)} | found


def choose_platform(*given: Any, **functions: Callable[..., Results]) -> Results:
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

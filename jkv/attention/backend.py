"""What a backend is: how attention is computed, where, and why not.

A backend is a value: a frozen dataclass, hashable, that what is jitted is told of. What
it leaves out is as here: it plans nothing, stores nothing, and has no derivative.
`jkv.attention.choice.BACKENDS` is where it stands among the others.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jkv.attention.call import Call, Requests
from jkv.attention.cards import DEFAULT, Card
from jkv.attention.derivative import Cotangents, Gradients, shape_gradients
from jkv.attention.pools import Pools
from jkv.attention.slots import SlotWrite


class StepShape(NamedTuple):
    """What is planned for: a step, and what one device has of a group. Static."""

    num_rows: int  # R
    is_decoding: bool  # whether each request has one row at most
    by_position: bool  # whether bits shall depend on a row's position alone
    num_kv_heads: int  # K
    part_size: int  # tokens of a block
    num_parts: int  # of a block, each on another device
    window: int | None  # tokens that a row sees in any call at most, None for all


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Of calls and arrays that it is asked about only shapes, dtypes and what is static
    matter.
    """

    name: ClassVar[str]  # what `implementation=` says
    # Where it runs when it is named, and where it is chosen without being named.
    platforms: ClassVar[tuple[str, ...]] = (DEFAULT,)
    unasked: ClassVar[tuple[str, ...]] = ()
    # Whether what a row gets depends on its position alone, if a call asks for it.
    is_by_position: ClassVar[bool] = False
    # Whether there is a log-sum-exp, in float32. Without one it is never chosen unasked
    # nor differentiated: others take its place there.
    has_lse: ClassVar[bool] = True
    # Whether JAX differentiates it as it stands.
    is_differentiable: ClassVar[bool] = False
    # The classes that a plan is made of, and those of their static fields.
    plan_nodes: ClassVar[tuple[type, ...]] = ()
    plan_sizes: ClassVar[tuple[type, ...]] = ()

    def with_scale(self, scale: float | None) -> Self:
        """Return what serves calls of this scale, None if it may vary."""
        del scale
        return self

    def why_not(self, call: Call, card: Card) -> str | None:
        """Say why it cannot serve a call there, None if it can."""
        del call, card
        return None

    def attend(self, call: Call, card: Card) -> tuple[jax.Array, jax.Array]:
        """Return [R, H, Dv] in the output's dtype and the log-sum-exp, f32[R, H].

        That is the natural logarithm of the softmax denominators. Rows that see nothing
        are zeros and -inf.
        """
        raise NotImplementedError

    def why_not_derived(self, call: Call, card: Card) -> str | None:
        """Say why it cannot differentiate a call there, None if it can."""
        del call, card
        return f"{self.name} has no derivative"

    def differentiate(
        self, call: Call, cotangents: Cotangents, card: Card
    ) -> Gradients:
        """Return the gradients, whatever computed the result."""
        raise NotImplementedError

    def why_not_stored(self, write: SlotWrite, card: Card) -> str | None:
        """Say why it does not store such rows there, None if it does."""
        del write, card
        return f"{self.name} stores no rows"

    def store(self, write: SlotWrite, card: Card) -> dict[str, jax.Array]:
        """Return the arrays with the rows in their slots, to the bits of `scatter`."""
        raise NotImplementedError

    def plan(
        self,
        pools: Pools,  # of which only head dims and dtypes matter
        requests: Requests,  # as `paged_attention` takes their arrays
        # i32[N], how many rows of the tables have each block
        reference_counts: jax.Array,
        step: StepShape,
    ) -> Any | None:
        """Find out what all layers of a step share; None for nothing.

        Calls of the step have the pytree in `Call.plans`, by the backend's name.
        """
        del pools, requests, reference_counts, step
        return None


@dataclasses.dataclass(frozen=True)
class Refusal(Backend):
    """What stands where a named backend does not apply: NotImplementedError.

    It is raised in programs that come to be lowered for a platform.
    """

    reason: str

    def attend(self, call: Call, card: Card) -> tuple[jax.Array, jax.Array]:
        """Stand for a result."""
        del card
        return _bind(self.reason, call.results)

    def differentiate(
        self, call: Call, cotangents: Cotangents, card: Card
    ) -> Gradients:
        """Stand for gradients."""
        del cotangents, card
        return _bind(self.reason, shape_gradients(call))


def _bind(reason: str, shapes: Any) -> Any:
    leaves, structure = jax.tree.flatten(shapes)
    refused = _refuse.bind(reason=reason, results=tuple(leaves))
    return jax.tree.unflatten(structure, refused)


def _find_types(*, results: Any, **_params: Any) -> Any:
    return [jax.core.ShapedArray(result.shape, result.dtype) for result in results]


def _lower(_ctx: Any, *, reason: str, **_params: Any) -> Any:
    raise NotImplementedError(reason)


_refuse = Primitive("jkv_refuse")
_refuse.multiple_results = True
_refuse.def_abstract_eval(_find_types)
mlir.register_lowering(_refuse, _lower)

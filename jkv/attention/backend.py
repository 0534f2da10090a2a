"""What a backend is: how attention is computed, where, and why not.

A backend is a value: a frozen dataclass, hashable, that what is jitted is told of. What
it leaves out is as here: it plans nothing, stores nothing, and has no derivative.
`jkv.attention.choice.BACKENDS` is where it stands among the others.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jkv.attention.call import Call, Pools, Requests
from jkv.attention.slots import SlotWrite

# Stands for all platforms that are not named.
DEFAULT = "default"


class Card(NamedTuple):
    """What a program is lowered for."""

    platform: str  # as JAX names it: "rocm", "cuda", "cpu"; or `DEFAULT`
    target: str | None  # such as "gfx942" or "sm_90"; None where it is not known


def find_card(platform: str) -> Card:
    """Return what is known of the card of a platform."""
    is_gpu = platform in ("rocm", "cuda")
    return Card(platform, find_target(platform) if is_gpu else None)


def find_gpu() -> Card | None:
    """Return the GPU at hand, None if there is none."""
    cards = map(find_card, ("rocm", "cuda"))
    return next((card for card in cards if card.target is not None), None)


def find_target(
    platform: str,  # "rocm" or "cuda"
) -> str | None:
    """Name the GPU at hand, such as gfx942 or sm_90, as far as it is of a platform.

    None if the program is to run on some other machine, and the card not known.
    """
    device = jax.devices()[0]
    # From JAX 0.11 on a program may be meant for a card that is not here but named
    # (`use_abstract_mesh`); only AMD's names are those of targets.
    mesh = jax.sharding.get_abstract_mesh()
    named = getattr(mesh, "abstract_device", None)
    if named is not None and named.device_kind != device.device_kind:
        is_target = platform == "rocm" and named.device_kind.startswith("gfx")
        return named.device_kind if is_target else None
    name = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or name.startswith("gfx") != (platform == "rocm"):
        return None
    return name.split(":")[0] if platform == "rocm" else f"sm_{name.replace('.', '')}"


class Cotangents(NamedTuple):
    """What a backward pass reads of each row and head, beside the call."""

    d_output: jax.Array  # [R, H, Dv], in the output's dtype
    lse: jax.Array  # f32[R, H], -inf for a row that sees nothing
    # d score = weight * (d weight - delta): what the softmax couples, summed up.
    delta: jax.Array  # f32[R, H], sum(d_output * output) - d_lse


class Gradients(NamedTuple):
    """Cotangents of what is multiplied; of the pools None unless they hold floats."""

    queries: jax.Array  # f32[R, H, D], of the scaled queries
    keys: jax.Array | None  # [L, N, K, T, D], in the pool's dtype
    values: jax.Array | None  # [L, N, K, T, Dv], None also if they lie in the keys


def shape_gradients(call: Call) -> Gradients:
    """Return the shapes and dtypes of what a backward pass gives."""
    queries = jax.ShapeDtypeStruct(call.queries.shape, jnp.float32)
    pools = map(_shape_gradient, (call.pools.keys, call.pools.values))
    shapes: tuple[Any, ...] = queries, *pools
    return Gradients(*shapes)


def _shape_gradient(pool: jax.Array | None) -> jax.ShapeDtypeStruct | None:
    """Return that of a pool of whole floats, None for what has no gradient."""
    if pool is None or not jnp.issubdtype(pool.dtype, jnp.floating):
        return None
    if pool.dtype.itemsize == 1:
        return None
    return jax.ShapeDtypeStruct(pool.shape, pool.dtype)


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
    # Whether there is a log-sum-exp, in float32. Without one it is never differentiated
    # nor asked for one: others take its place there.
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
        """Return the arrays with the rows in their slots, to the bits of `scatter`.

        Rounded elements may be one unit apart on GPUs (`jkv.formats.scaled`).
        """
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

"""The interface of attention backends.

A backend is a frozen, hashable dataclass, so that jitted functions take it as a static
argument. By default a backend has no plan, no stores and no derivative. The available
backends are listed in `jkv.attention.choice.BACKENDS`.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jkv.attention.call import Call, Past, Pools, Requests
from jkv.attention.slots import SlotWrite

# All platforms without an entry of their own.
DEFAULT = "default"


class DeviceType(NamedTuple):
    """A platform and GPU target that a program is lowered for."""

    platform: str  # as JAX names it: "rocm", "cuda", "cpu"; or `DEFAULT`
    target: str | None  # such as "gfx942" or "sm_90"; None if unknown


def find_device(platform: str) -> DeviceType:
    """Return the platform with its GPU target, if it has one."""
    is_gpu = platform in ("rocm", "cuda")
    return DeviceType(platform, find_target(platform) if is_gpu else None)


def find_gpu() -> DeviceType | None:
    """Return the local GPU, None without one."""
    devices = map(find_device, ("rocm", "cuda"))
    return next((device for device in devices if device.target is not None), None)


def find_target(
    platform: str,  # "rocm" or "cuda"
) -> str | None:
    """Return the GPU target, such as gfx942 or sm_90, for a platform.

    None if there is no such GPU, or if the program is compiled for an unknown one.
    """
    device = jax.devices()[0]
    # From JAX 0.11 on, `use_abstract_mesh` may name a GPU that is not present; only
    # AMD's device kinds are names of targets.
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
    """The residuals of a backward pass per row and head, beside the call."""

    d_output: jax.Array  # [R, H, Dv], in the output's dtype
    lse: jax.Array  # f32[R, H], -inf for a row that attends to no token
    # The softmax term of d score = weight * (d weight - delta).
    delta: jax.Array  # f32[R, H], sum(d_output * output) - d_lse


class Gradients(NamedTuple):
    """Cotangents of queries, keys and values; None for pools that hold no floats."""

    queries: jax.Array  # f32[R, H, D], of the scaled queries
    keys: jax.Array | None  # [L, N, K, T, D], in the pool's dtype
    values: jax.Array | None  # [L, N, K, T, Dv], None also if they are part of the keys


def shape_gradients(call: Call) -> Gradients:
    """Return the shapes and dtypes of the result of a backward pass."""
    queries = jax.ShapeDtypeStruct(call.queries.shape, jnp.float32)
    pools = map(_shape_gradient, (call.pools.keys, call.pools.values))
    shapes: tuple[Any, ...] = queries, *pools
    return Gradients(*shapes)


def _shape_gradient(pool: jax.Array | None) -> jax.ShapeDtypeStruct | None:
    """Return the shape of a float pool's gradient, None for quantized pools."""
    if pool is None or not jnp.issubdtype(pool.dtype, jnp.floating):
        return None
    if pool.dtype.itemsize == 1:
        return None
    return jax.ShapeDtypeStruct(pool.shape, pool.dtype)


class StepShape(NamedTuple):
    """The static description of a step, as input of `Backend.plan`."""

    num_rows: int  # R
    is_decoding: bool  # each request has at most one row
    by_position: bool  # batch-invariant
    num_kv_heads: int  # K, per device
    part_size: int  # tokens of a block on one device
    num_parts: int  # devices that share a block
    window: int | None  # longest sliding window of all layers, None for full attention


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    The methods `why_not*` may depend on shapes, dtypes and static fields only.
    """

    name: ClassVar[str]  # value of `implementation=`
    # Platforms on which it may be named, and on which it is a default.
    platforms: ClassVar[tuple[str, ...]] = (DEFAULT,)
    default_platforms: ClassVar[tuple[str, ...]] = ()
    # Supports `by_position` (batch-invariant) calls.
    is_by_position: ClassVar[bool] = False
    # Returns a float32 log-sum-exp. Other backends serve `return_lse` and
    # differentiated calls in its place if not.
    has_lse: ClassVar[bool] = True
    # Differentiable by JAX itself.
    is_differentiable: ClassVar[bool] = False
    # Pytree nodes of a plan, and the classes of their static fields.
    plan_nodes: ClassVar[tuple[type, ...]] = ()
    plan_sizes: ClassVar[tuple[type, ...]] = ()

    def with_scale(self, scale: float | None, *, is_named: bool = True) -> Self:
        """Specialize to a static scale; None if the scale is traced.

        Args:
          scale: the scale.
          is_named: False if the backend is a default and not the caller's choice.
        """
        del scale, is_named
        return self

    def why_not(self, call: Call, device: DeviceType) -> str | None:
        """Return the reason it cannot serve a call, None if it can."""
        del call, device
        return None

    def attend(self, call: Call, device: DeviceType) -> tuple[jax.Array, jax.Array]:
        """Return [R, H, Dv] in the output's dtype and the log-sum-exp, f32[R, H].

        The log-sum-exp is the natural logarithm of the softmax denominators. Rows that
        attend to no token return zeros and -inf.
        """
        raise NotImplementedError

    def why_not_derived(self, call: Call, device: DeviceType) -> str | None:
        """Return the reason it cannot differentiate a call, None if it can."""
        del call, device
        return f"{self.name} has no derivative"

    def differentiate(
        self, call: Call, cotangents: Cotangents, device: DeviceType
    ) -> Gradients:
        """Return the gradients of a call that any backend has computed."""
        raise NotImplementedError

    def why_not_stored(self, write: SlotWrite, device: DeviceType) -> str | None:
        """Return the reason it cannot store these rows, None if it can."""
        del write, device
        return f"{self.name} stores no rows"

    def store(self, write: SlotWrite, device: DeviceType) -> dict[str, jax.Array]:
        """Return the arrays with the rows stored, bit-identical to `scatter`.

        On GPUs, quantized elements may be off by one unit (`jkv.formats.scaled`).
        """
        raise NotImplementedError

    def plan(
        self,
        pools: Pools,  # only head dims and dtypes are used
        requests: Requests,  # as passed to `paged_attention`
        # i32[N], reference count of each block
        reference_counts: jax.Array,
        step: StepShape,
        past: Past | None,  # as passed to `paged_attention`
    ) -> Any | None:
        """Compute the work shared by all layers of a step; None for no plan.

        `Call.plans` holds the returned pytree under the backend's name.
        """
        del pools, requests, reference_counts, step, past
        return None


@dataclasses.dataclass(frozen=True)
class Refusal(Backend):
    """The replacement of a named backend that does not support a call.

    Lowering a program with it for the platform raises NotImplementedError.
    """

    reason: str

    def attend(self, call: Call, device: DeviceType) -> tuple[jax.Array, jax.Array]:
        """Return a placeholder of the result's shape."""
        del device
        return _bind(self.reason, call.results)

    def differentiate(
        self, call: Call, cotangents: Cotangents, device: DeviceType
    ) -> Gradients:
        """Return placeholders of the gradients' shapes."""
        del cotangents, device
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

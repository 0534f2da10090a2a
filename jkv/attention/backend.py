"""The interface of attention backends: the data of a call, and what a backend answers.

A backend is a frozen, hashable dataclass, so that jitted functions take it as a static
argument. By default a backend has no plan, no stores and no derivative. The available
backends are listed in `jkv.attention.choice.BACKENDS`.

Symbols: `R` query rows, `H` query heads, `K` kv heads, `G = H // K` query heads of one
kv head, `D` (`Dv`) key (value) head dim; `L` layers, `N` blocks, `T` tokens per block;
`S` rows of the block tables, `M` blocks per row, `B` requests.

With context parallelism, a call reads parts of blocks: of each block of T tokens the
first of n devices holds the first T / n, and so on. A device's part of a sequence lies
in its pool without gaps and in order, as a shorter sequence does, and is attended to as
such; `find_held` maps a row's position to the shorter sequence. The devices' results
are joined by their log-sum-exp (`softmax.join_parts`).
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jkv.formats.format import Format, Formats, Parts, name_parts
from jkv.operations import gather

# All platforms without an entry of their own.
DEFAULT = "default"


class Stored(NamedTuple):
    """Keys or values as they are stored."""

    parts: Parts  # [L, N, K, T, ...] each
    format: Format

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.parts["pool"].shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pools:
    """Stored keys and values with their formats.

    Symbols: `L` layers, `N` blocks, `K` kv heads, `T` tokens per block, `D` (`Dv`) key
    (value) head dim.
    """

    keys: jax.Array  # [L, N, K, T, D], or packed as their format requires
    values: jax.Array | None  # [L, N, K, T, Dv]; None: the first Dv of each key
    # [L, N, K, T], float or raw bits, None for formats without scales. Without `values`
    # the keys' scales apply to both.
    key_scales: jax.Array | None
    value_scales: jax.Array | None
    # Static: packed formats and latent values do not show them in their shapes.
    head_dim: int = dataclasses.field(metadata={"static": True})  # D
    value_dim: int = dataclasses.field(metadata={"static": True})  # Dv
    formats: Formats = dataclasses.field(metadata={"static": True})

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.keys.shape[2]

    @property
    def block_size(self) -> int:
        """T."""
        return self.keys.shape[3]

    @property
    def stored_keys(self) -> Stored:
        """The keys."""
        parts = {"pool": self.keys, "scales": self.key_scales}
        return Stored(_present(parts), self.formats.key)

    @property
    def stored_values(self) -> Stored | None:
        """The values, None if they are the first Dv elements of each key."""
        if self.values is None:
            return None
        parts = {"pool": self.values, "scales": self.value_scales}
        return Stored(_present(parts), self.formats.value)

    @property
    def dtypes(self) -> set[np.dtype[Any]]:
        """The dtypes of the elements: one, or two if keys and values differ."""
        return {each.dtype for each in self.formats}


class Requests(NamedTuple):
    """The requests of one call. Padding has query length 0 and names sequence 0.

    Request i owns rows `query_starts[i] .. query_starts[i] + query_lengths[i] - 1`; its
    last row is the token at position `context_lengths[i] - 1`: context lengths include
    the tokens of the call.
    """

    block_tables: jax.Array  # i32[S, M], arbitrary past a sequence's end
    seq_ids: jax.Array  # i32[B], rows of block_tables
    query_starts: jax.Array  # i32[B], R for padding
    query_lengths: jax.Array  # i32[B]
    context_lengths: jax.Array  # i32[B], at most M * T, of whole blocks


class Past(NamedTuple):
    """The range of tokens that a request's rows may attend to.

    The causal mask and the window limit each row further.
    """

    end: jax.Array  # i32[B], past the last token
    first: jax.Array | None = None  # i32[B]; None for 0

    def limit(
        self, request: jax.Array, last: jax.Array, before: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Clip rows' last token, and the token before their first one.

        Args:
          request: i32[...], request of each row, or of each group of rows.
          last: i32[..., Q] or i32[...], last token of each row.
          before: as `last`, None for rows that attend from token 0 on.
        """

        def per_row(values: jax.Array) -> jax.Array:
            found = gather(values, request)
            return found.reshape(found.shape + (1,) * (last.ndim - found.ndim))

        last = jnp.minimum(last, per_row(self.end) - 1)
        if self.first is None:
            return last, before
        least = jnp.broadcast_to(per_row(self.first) - 1, last.shape)
        return last, least if before is None else jnp.maximum(before, least)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The arguments of an attention backend; static fields are compile-time ones."""

    queries: jax.Array  # [R, H, D], not scaled
    pools: Pools
    layer: jax.Array  # i32[]
    requests: Requests
    scale: jax.Array  # f32[]
    window: jax.Array | None  # i32[]
    sinks: jax.Array | None  # f32[H]
    # i32[], the part of each block that the pools hold; None: whole blocks. Positions
    # and lengths count whole sequences.
    part: jax.Array | None = None
    # Limits the tokens that rows attend to, in whole blocks; None for no limit.
    past: Past | None = None
    # Plans of the step by backend name.
    plans: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Static: these change the traced program.
    soft_cap: float | None = dataclasses.field(metadata={"static": True})
    max_query_length: int | None = dataclasses.field(metadata={"static": True})
    num_parts: int = dataclasses.field(default=1, metadata={"static": True})
    # Batch-invariant: a row's result may depend on its own sequence only.
    by_position: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """R."""
        return self.queries.shape[0]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.queries.shape[1]

    @property
    def heads_per_kv(self) -> int:
        """Query heads of one kv head, G."""
        return self.num_heads // self.pools.num_kv_heads

    @property
    def num_requests(self) -> int:
        """B."""
        return self.requests.seq_ids.shape[0]

    @property
    def max_blocks(self) -> int:
        """M."""
        return self.requests.block_tables.shape[1]

    @property
    def is_decoding(self) -> bool:
        """True if every request is known to have at most one row."""
        return self.max_query_length == 1

    @property
    def output_dtype(self) -> jnp.dtype:
        """The dtype of results: float32 for parts, to be rounded after the join."""
        return self.queries.dtype if self.part is None else jnp.dtype(jnp.float32)

    def find_held(self, positions: jax.Array) -> jax.Array:
        """Return the last local token at or before each position, i32[...]."""
        size = self.pools.block_size
        return find_held(positions, self.part, self.num_parts, size)

    def of_last_rows(self) -> tuple[Requests, jax.Array | None]:
        """Return the requests and window of their last rows, in local tokens.

        Context lengths count the tokens in the local pools; the window is i32[] or
        i32[B], None for full attention.
        """
        if self.past is not None:
            return self._of_past_rows(self.past)
        if self.part is None:
            return self.requests, self.window
        last = self.requests.context_lengths - 1
        held = self.find_held(last)
        requests = self.requests._replace(context_lengths=held + 1)
        if self.window is None:
            return requests, None
        return requests, held - self.find_held(last - self.window)

    def _of_past_rows(self, past: Past) -> tuple[Requests, jax.Array | None]:
        """Return the requests and windows of last rows within a limited range."""
        request = jnp.arange(self.num_requests, dtype=jnp.int32)
        last = self.requests.context_lengths - 1
        before = None if self.window is None else last - self.window
        last, before = past.limit(request, last, before)
        requests = self.requests._replace(context_lengths=jnp.maximum(last + 1, 0))
        return requests, None if before is None else last - before

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of a backend's result."""
        shape = (self.num_rows, self.num_heads)
        return (
            jax.ShapeDtypeStruct((*shape, self.pools.value_dim), self.output_dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        )


def call_of(queries: jax.Array, pools: Pools) -> Call:
    """Return a call with shapes and dtypes only, for `Backend.why_not`."""
    none: Any = jax.ShapeDtypeStruct((0,), jnp.int32)
    table: Any = jax.ShapeDtypeStruct((0, 0), jnp.int32)
    return Call(
        queries=queries,
        pools=pools,
        layer=none,
        requests=Requests(table, none, none, none, none),
        scale=none,
        window=None,
        sinks=None,
        soft_cap=None,
        max_query_length=None,
    )


def _present(parts: dict[str, jax.Array | None]) -> Parts:
    return {name: array for name, array in parts.items() if array is not None}


def make_requests(
    # arrays of any integer type; out-of-range entries are padding
    given: Requests,
    *,
    num_rows: int,  # of the call, R
    block_size: int,  # tokens of a whole block
    max_query_length: int | None,  # most rows of a request, None for R
    is_limited: bool = False,  # rows may follow the last slot, as `past` limits them
) -> Requests:
    """Convert requests to i32 and replace out-of-range entries by padding."""
    block_tables, seq_ids, query_starts, query_lengths, context_lengths = (
        jnp.asarray(array).astype(jnp.int32) for array in given
    )
    num_sequences, max_blocks = block_tables.shape

    is_live = (seq_ids >= 0) & (seq_ids < num_sequences)
    is_live &= (query_starts >= 0) & (query_starts < num_rows)
    # Bounding each length first keeps every later sum far below 2**31.
    rows_left = jnp.maximum(num_rows - query_starts, 0)
    if max_query_length is not None:
        rows_left = jnp.minimum(rows_left, max_query_length)
    query_lengths = jnp.where(is_live, jnp.clip(query_lengths, 0, rows_left), 0)
    most = max_blocks * block_size + (num_rows if is_limited else 0)
    context_lengths = jnp.clip(context_lengths, 0, most)
    return Requests(
        block_tables=block_tables,
        seq_ids=jnp.where(is_live, seq_ids, 0),
        query_starts=jnp.where(is_live, query_starts, num_rows),
        query_lengths=query_lengths,
        context_lengths=context_lengths,
    )


def empty_results(call: Call) -> tuple[jax.Array, jax.Array]:
    """Return the result of a call without rows or requests: zeros and -inf."""
    output, lse = call.results
    return (
        jnp.zeros(output.shape, output.dtype),
        jnp.full(lse.shape, -jnp.inf, lse.dtype),
    )


def check_call(call: Call) -> None:
    """Assert the shapes and dtypes of a call at trace time."""
    import chex  # importing it takes longer than all of jkv

    requests, num_requests = call.requests, call.num_requests
    chex.assert_shape(call.queries, (None, None, call.pools.head_dim))
    chex.assert_is_divisible(call.num_heads, call.pools.num_kv_heads)
    chex.assert_rank(call.pools.keys, 5)
    chex.assert_rank([call.layer, call.scale], 0)
    chex.assert_rank(requests.block_tables, 2)
    chex.assert_shape(list(requests[1:]), (num_requests,))
    chex.assert_type([call.layer, *requests], jnp.int32)
    chex.assert_type(call.scale, jnp.float32)
    if call.window is not None:
        chex.assert_shape(call.window, ())
        chex.assert_type(call.window, jnp.int32)
    if call.sinks is not None:
        chex.assert_shape(call.sinks, (call.num_heads,))
        chex.assert_type(call.sinks, jnp.float32)


def find_held(
    positions: jax.Array,  # i32[...], in the sequence
    # i32[], the part of each block held here; None for whole blocks
    part: jax.Array | None,
    num_parts: int,  # of a block
    block_size: int,  # tokens of a part
) -> jax.Array:
    """Return the index of the last local token at or before each position.

    Local tokens are counted from 0; -1 if there is none, also for negative positions.
    """
    if part is None:
        return positions
    count = jnp.maximum(positions + 1, 0)
    num_blocks = lax.div(count, jnp.int32(num_parts * block_size))
    rest = count - num_blocks * (num_parts * block_size)
    in_block = jnp.clip(rest - part * block_size, 0, block_size)
    return num_blocks * block_size + in_block - 1


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SlotWrite:
    """Rows of one layer to store, the arrays to update, and the slot of each row.

    A row goes to `arrays[name][layer, block_ids[row], :, offsets[row]]`. It is stored
    if it is valid, its indices are in range and, with `part`, its slot is in this part
    of the block.
    """

    arrays: dict[str, jax.Array]  # [L, N, K, T, ...]
    # [R, K, D] of "key_pool" and "value_pool", in the input dtype of their formats
    rows: dict[str, jax.Array]
    layer: jax.Array  # i32[], negative for none
    block_ids: jax.Array  # i32[R], N for none
    offsets: jax.Array  # i32[R], in the whole block
    valid: jax.Array  # bool[R]
    # i32[], the part of each block that the arrays hold; None: whole blocks.
    part: jax.Array | None = None
    formats: Formats = dataclasses.field(metadata=dict(static=True))

    @property
    def num_rows(self) -> int:
        """R."""
        return self.valid.shape[0]

    @property
    def pool(self) -> jax.Array:
        """The keys' array; all arrays share its sizes [L, N, K, T]."""
        return self.arrays["key_pool"]

    def rows_as_bits(self) -> dict[str, jax.Array]:
        """Encode the rows by their formats, keyed by the names of the arrays."""
        bits: dict[str, jax.Array] = {}
        for name, rows in self.rows.items():
            parts = self.formats.of(name)[0].put(rows)
            bits |= name_parts(name.removesuffix("_pool"), parts)
        return bits


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

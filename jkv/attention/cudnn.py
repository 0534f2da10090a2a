"""cuDNN as a backend, through JAX's attention, for long prompts on CUDA GPUs.

On an H100 it takes 0.95, 0.76 and 0.56 of the kernel's time for prompts of 4,096, 8,192
and 32,768 tokens, and 0.81 beside 64 decoding sequences (`docs/measured.md`).

Its constraints were read in JAX 0.10.2 and 0.12
(`jax._src.cudnn.fused_attention_stablehlo`). Its log-sum-exp is rounded to the queries'
dtype: bfloat16 has steps of 1/16 between 8 and 16, an error of up to 3% in a weight. So
its results are never joined with others.

That restricts it to a prompt without cached tokens, whose rows attend to each other
only. Its keys and values, which the step has just written, are read back once into
contiguous arrays; paged attention computes the rows of all other requests. Sizes are
static, so cuDNN serves one prompt, which must have nearly all rows of a large step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import Backend, Call, DeviceType, Stored, check_call
from jkv.formats.format import multiply_out
from jkv.operations import vary_over, varying_axes

# Least rows of a step, and the share of them, 15/16, that the prompt must have.
MIN_ROWS, _NUM_PARTS = 4_096, 16


@dataclasses.dataclass(frozen=True)
class Cudnn(Backend):
    """cuDNN for a long prompt without cached tokens, other backends for other rows."""

    name: ClassVar[str] = "cudnn"
    platforms: ClassVar[tuple[str, ...]] = ("cuda",)
    default_platforms: ClassVar[tuple[str, ...]] = ("cuda",)
    has_lse: ClassVar[bool] = False

    others: tuple[Backend, ...]  # the last one supports all calls
    scale: float | None = None  # compile-time constant; None if traced
    is_named: bool = False  # False: only for steps where cuDNN is faster

    def with_scale(self, scale: float | None, *, is_named: bool = True) -> Self:
        """Specialize to a static scale."""
        return dataclasses.replace(self, scale=scale, is_named=is_named)

    def why_not(self, call: Call, device: DeviceType) -> str | None:
        """Return the first unmet requirement of cuDNN."""
        del device
        pools, dtype, head_dim = call.pools, call.queries.dtype, call.queries.shape[2]
        if not self.is_named and (call.num_rows < MIN_ROWS or call.is_decoding):
            return f"cuDNN is faster only from {MIN_ROWS:,} prompt rows on"
        if dtype not in (jnp.bfloat16, jnp.float16):
            return f"cuDNN supports bfloat16 and float16, the queries are {dtype}"
        if pools.values is None or pools.value_dim != head_dim:
            return "cuDNN needs separate keys and values of one head dim"
        if call.soft_cap is not None or call.sinks is not None:
            return "cuDNN supports neither soft_cap nor sinks"
        if call.part is not None:
            return "blocks are sharded over devices, so no device has a whole prompt"
        if call.past is not None:
            return "cuDNN attends to a prompt's own tokens, which past= excludes"
        if self.scale is None:
            return (
                "cuDNN needs a static scale: pass a Python number, or omit scale on a "
                "mesh for 1 / sqrt(D)"
            )
        # JAX checks the rest: an installed cuDNN, a head dim that the GPU supports.
        queries, keys = (
            jax.ShapeDtypeStruct((8, heads, head_dim), dtype)
            for heads in (call.num_heads, pools.num_kv_heads)
        )
        try:
            jax.eval_shape(
                functools.partial(_attend_contiguous, scale=1.0), queries, keys, keys
            )
        except (NotImplementedError, RuntimeError) as error:
            return str(error).rstrip(".")
        return None

    def attend(self, call: Call, device: DeviceType) -> tuple[jax.Array, jax.Array]:
        """Compute the long prompt by cuDNN and all other rows by another backend."""
        assert self.scale is not None  # checked by `why_not`
        other = next(one for one in self.others if one.why_not(call, device) is None)
        return attend_prompts(
            call,
            attend=functools.partial(other.attend, device=device),
            attend_contiguous=functools.partial(_attend_contiguous, scale=self.scale),
        )


def _attend_contiguous(
    queries: jax.Array,  # [Q, H, D]
    keys: jax.Array,  # [Q, K, D], in the queries' dtype
    values: jax.Array,  # [Q, K, D], as keys
    scale: float,
) -> jax.Array:
    """Return causal attention over contiguous rows, [Q, H, D]."""
    attend = functools.partial(
        jax.nn.dot_product_attention,
        scale=scale,
        is_causal=True,
        implementation="cudnn",
    )
    # JAX 0.10.2 has no rule for a `vmap` over queries alone.
    attend = jax.custom_batching.sequential_vmap(attend)
    output: jax.Array = attend(queries[None], keys[None], values[None])
    return output[0]


class Prompt(NamedTuple):
    """The prompt computed by cuDNN, i32[] each."""

    request: jax.Array
    start: jax.Array  # its first row
    length: jax.Array  # its rows, 0 without such a prompt


def attend_prompts(
    call: Call,
    *,
    attend: Callable[[Call], tuple[jax.Array, jax.Array]],  # all other requests
    attend_contiguous: Callable[..., jax.Array],  # the prompt
    min_rows: int = MIN_ROWS,  # of the step
) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv], and NaN as log-sum-exp, which cuDNN does not provide."""
    check_call(call)
    lse = jnp.full(call.results[1].shape, jnp.nan, jnp.float32)
    if call.num_rows < min_rows or call.is_decoding:
        return attend(call)[0], lse
    prompt = find_prompt(call)
    # Inside `shard_map` both branches must vary over the same axes.
    axes = varying_axes(call)
    others = vary_over(attend(without_prompt(call, prompt))[0], axes)

    def attend_prompt() -> jax.Array:
        own = _attend_prompt(call, prompt, attend_contiguous)
        row = jnp.arange(call.num_rows, dtype=jnp.int32) - prompt.start
        is_own = (row >= 0) & (row < prompt.length)
        own = own.at[row].get(mode="clip")
        return vary_over(jnp.where(is_own[:, None, None], own, others), axes)

    return lax.cond(prompt.length > 0, attend_prompt, lambda: others), lse


def find_prompt(call: Call) -> Prompt:
    """Return the prompt without cached tokens that has nearly all rows, if any.

    A prompt longer than the window is left to paged attention.
    """
    requests, lengths = call.requests, call.requests.query_lengths
    least = -(-call.num_rows * (_NUM_PARTS - 1) // _NUM_PARTS)
    fits = (requests.context_lengths == lengths) & (lengths >= least)
    if call.window is not None:
        fits &= lengths <= call.window
    request = jnp.argmax(fits).astype(jnp.int32)
    own = jnp.stack([requests.query_starts[request], lengths[request]])
    return Prompt(request, *jnp.where(fits[request], own, 0))


def without_prompt(call: Call, prompt: Prompt) -> Call:
    """Return the call and its requests without the prompt's rows, and without plans."""
    requests = call.requests
    request = jnp.arange(call.num_requests, dtype=jnp.int32)
    is_prompt = (request == prompt.request) & (prompt.length > 0)
    lengths = jnp.where(is_prompt, 0, requests.query_lengths)
    requests = requests._replace(query_lengths=lengths)
    return dataclasses.replace(call, requests=requests, plans={})


def _attend_prompt(
    call: Call, prompt: Prompt, attend: Callable[..., jax.Array]
) -> jax.Array:
    """Return the prompt's attention, [R, H, D], first row at 0; arbitrary past its end.

    Rows from the first non-finite key or value on are NaN. Such tokens are zeroed
    first: a causal mask alone does not protect earlier rows, as 0 * NaN is NaN.
    """
    pools, requests = call.pools, call.requests
    token = jnp.arange(call.num_rows, dtype=jnp.int32)
    queries = call.queries.at[prompt.start + token].get(mode="clip")
    block_size = jnp.int32(pools.block_size)
    table = requests.block_tables[requests.seq_ids[prompt.request]]
    blocks = table.at[lax.div(token, block_size)].get(mode="clip")
    # A negative index would wrap.
    blocks, offsets = jnp.maximum(blocks, 0), lax.rem(token, block_size)
    index = call.layer, blocks, slice(None), offsets

    def gather(stored: Stored) -> jax.Array:
        parts = {n: a.at[index].get(mode="clip") for n, a in stored.parts.items()}
        return multiply_out(*stored.format.get(parts))

    assert pools.stored_values is not None
    keys, values = gather(pools.stored_keys), gather(pools.stored_values)
    # Slots past the prompt's end hold arbitrary numbers.
    is_broken = ~jnp.all(jnp.isfinite(keys) & jnp.isfinite(values), axis=2)  # [R, K]
    left_out = is_broken | (token >= prompt.length)[:, None]
    rows = (jnp.where(left_out[..., None], 0.0, each) for each in (keys, values))
    output = attend(queries, *(each.astype(queries.dtype) for each in rows))
    first = jnp.min(jnp.where(is_broken, token[:, None], call.num_rows), axis=0)
    sees = jnp.repeat(token[:, None] >= first[None, :], call.heads_per_kv, axis=1)
    return jnp.where(sees[..., None], jnp.nan, output)

"""cuDNN as a backend, by JAX's attention: for long prompts on CUDA GPUs.

An H100 takes 0.95, 0.76 and 0.56 of the kernel's time for prompts of 4,096, 8,192 and
32,768 tokens, and 0.81 beside 64 sequences that decode (`docs/measured.md`).

The only file that calls it. What it takes was read in JAX 0.10.2 and 0.12
(`jax._src.cudnn.fused_attention_stablehlo`). Its log-sum-exp comes rounded to the
queries' dtype: bfloat16 has steps of 1/16 between 8 and 16, so a weight would be wrong
by up to 3%. Nothing can be joined with that: rows come from here whole or not at all.

That suits a prompt without a past, whose own rows are all that they see. It needs no
pages: its keys and values, which the step has just written, are read back once, side by
side; the paged attention takes the rows of all other requests. Sizes are static, so one
prompt goes this way, which has nearly all rows of a large step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import Backend, Card
from jkv.attention.call import Call, Stored, check_call
from jkv.formats.format import multiply_out
from jkv.sharding.loops import vary_over, varying_axes

# Rows of a step for which it pays, and parts of them all but one of which it has.
MIN_ROWS, _NUM_PARTS = 4_096, 16


@dataclasses.dataclass(frozen=True)
class Cudnn(Backend):
    """cuDNN for a long prompt without a past, others for all other rows."""

    name: ClassVar[str] = "cudnn"
    platforms: ClassVar[tuple[str, ...]] = ("cuda",)
    unasked: ClassVar[tuple[str, ...]] = ("cuda",)
    has_lse: ClassVar[bool] = False

    others: tuple[Backend, ...]  # the last of which takes all calls
    scale: float | None = None  # what is compiled in; None if it may vary
    is_named: bool = False  # False: only for steps that it makes faster

    def with_scale(self, scale: float | None, *, is_named: bool = True) -> Self:
        """Compile this scale in."""
        return dataclasses.replace(self, scale=scale, is_named=is_named)

    def why_not(self, call: Call, card: Card) -> str | None:
        """Say what cuDNN does not have."""
        del card
        pools, dtype, head_dim = call.pools, call.queries.dtype, call.queries.shape[2]
        if not self.is_named and (call.num_rows < MIN_ROWS or call.is_decoding):
            return f"cuDNN pays from {MIN_ROWS:,} rows on"
        if dtype not in (jnp.bfloat16, jnp.float16):
            return f"cuDNN takes bfloat16 and float16, the queries are {dtype}"
        if pools.values is None or pools.value_dim != head_dim:
            return "cuDNN wants keys and values apart, with one head dim"
        if call.soft_cap is not None or call.sinks is not None:
            return "cuDNN has no soft cap and no sinks"
        if call.part is not None:
            return "blocks are spread over devices, none of which has a whole prompt"
        if self.scale is None:
            return (
                "cuDNN is compiled for one scale: give a Python number, or on a mesh "
                "none, which stands for 1 / sqrt(D)"
            )
        # JAX says what else there is: no cuDNN, a head dim that the card lacks.
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

    def attend(self, call: Call, card: Card) -> tuple[jax.Array, jax.Array]:
        """Attend to the prompt by cuDNN, where there is one."""
        assert self.scale is not None  # or there was a reason
        other = next(one for one in self.others if one.why_not(call, card) is None)
        return attend_prompts(
            call,
            attend=functools.partial(other.attend, card=card),
            attend_contiguous=functools.partial(_attend_contiguous, scale=self.scale),
        )


def _attend_contiguous(
    queries: jax.Array,  # [Q, H, D]
    keys: jax.Array,  # [Q, K, D], in the queries' dtype
    values: jax.Array,  # [Q, K, D], likewise
    scale: float,
) -> jax.Array:
    """Return what each row sees of its own token and those before it, [Q, H, D]."""
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
    """The prompt that goes this way, i32[] each."""

    request: jax.Array
    start: jax.Array  # its first row
    length: jax.Array  # its rows, 0 for none


def attend_prompts(
    call: Call,
    *,
    attend: Callable[[Call], tuple[jax.Array, jax.Array]],  # all other requests
    attend_contiguous: Callable[..., jax.Array],  # the prompt, as cuDNN does
    min_rows: int = MIN_ROWS,  # of a step in which a prompt goes this way
) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv], and NaN for the log-sum-exp, which nobody has of a prompt."""
    check_call(call)
    lse = jnp.full(call.results[1].shape, jnp.nan, jnp.float32)
    if call.num_rows < min_rows or call.is_decoding:
        return attend(call)[0], lse
    prompt = find_prompt(call)
    # Inside `shard_map` both must answer with what varies over the same axes.
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
    """Return the prompt without a past that has nearly all rows, if there is one.

    One that is longer than the window is left to the paged attention.
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
    """Return the call in which the prompt has no rows, without lists of the step's."""
    requests = call.requests
    request = jnp.arange(call.num_requests, dtype=jnp.int32)
    is_prompt = (request == prompt.request) & (prompt.length > 0)
    lengths = jnp.where(is_prompt, 0, requests.query_lengths)
    requests = requests._replace(query_lengths=lengths)
    return dataclasses.replace(call, requests=requests, plans={})


def _attend_prompt(
    call: Call, prompt: Prompt, attend: Callable[..., jax.Array]
) -> jax.Array:
    """Return what the prompt's rows see, [R, H, D], the first at row 0; then anything.

    Rows that see a key or value that is not finite are NaN: what masks weights does not
    keep it from the rows before, as 0 * NaN is NaN.
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
    # What lies behind the prompt's end may be anything.
    is_broken = ~jnp.all(jnp.isfinite(keys) & jnp.isfinite(values), axis=2)  # [R, K]
    left_out = is_broken | (token >= prompt.length)[:, None]
    rows = (jnp.where(left_out[..., None], 0.0, each) for each in (keys, values))
    output = attend(queries, *(each.astype(queries.dtype) for each in rows))
    first = jnp.min(jnp.where(is_broken, token[:, None], call.num_rows), axis=0)
    sees = jnp.repeat(token[:, None] >= first[None, :], call.heads_per_kv, axis=1)
    return jnp.where(sees[..., None], jnp.nan, output)

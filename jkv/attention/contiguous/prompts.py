"""Prompts without a past: their own rows are all that they see.

Such a prompt needs no pages: its keys and values, which the step has just written, are
read back once, side by side, for an attention over contiguous arrays; the paged one
takes the rows of all other requests. Nothing is joined. Sizes are static, so one prompt
goes this way, which has nearly all rows of a large step.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Call, check_call
from jkv.attention.pools import Stored
from jkv.formats.format import multiply_out
from jkv.sharding.varying import vary_over, varying_axes

# Rows of a step for which it pays, and parts of them all but one of which it has.
MIN_ROWS, _NUM_PARTS = 4_096, 16

# To [R, H, Dv] in the output's dtype, and the log-sum-exp, f32[R, H].
Attend = Callable[[Call], tuple[jax.Array, jax.Array]]
# [R, H, D] of queries, [R, K, D] of keys and of values, of one dtype, to what each row
# sees of its own token and those before it, [R, H, D].
AttendContiguous = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Prompt(NamedTuple):
    """The prompt that goes this way, i32[] each."""

    request: jax.Array
    start: jax.Array  # its first row
    length: jax.Array  # its rows, 0 for none


def attend_prompts(
    call: Call,
    *,
    attend: Attend,
    attend_contiguous: AttendContiguous,
    min_rows: int = MIN_ROWS,
) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv], and NaN for the log-sum-exp, which nobody has of a prompt.

    Args:
      call: without sinks, soft cap and part.
      attend: what takes the rows of all other requests.
      attend_contiguous: what takes a prompt's.
      min_rows: of a step in which a prompt goes this way.
    """
    check_call(call)
    lse = jnp.full(call.results[1].shape, jnp.nan, jnp.float32)
    if call.num_rows < min_rows or call.is_decoding:
        return attend(call)[0], lse
    prompt = find_prompt(call)
    others = attend(without_prompt(call, prompt))[0]
    # Inside `shard_map` both must answer with what varies over the same axes.
    axes = varying_axes(call)

    def attend_prompt() -> jax.Array:
        own = _attend_prompt(call, prompt, attend_contiguous)
        row = jnp.arange(call.num_rows, dtype=jnp.int32) - prompt.start
        is_own = (row >= 0) & (row < prompt.length)
        own = own.at[row].get(mode="clip")
        return vary_over(jnp.where(is_own[:, None, None], own, others), axes)

    ways = attend_prompt, lambda: vary_over(others, axes)
    return lax.cond(prompt.length > 0, *ways), lse


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
    start, length = requests.query_starts[request], lengths[request]
    return Prompt(
        request, jnp.where(fits[request], start, 0), jnp.where(fits[request], length, 0)
    )


def without_prompt(call: Call, prompt: Prompt) -> Call:
    """Return the call in which the prompt has no rows, without lists of the step's."""
    requests = call.requests
    request = jnp.arange(call.num_requests, dtype=jnp.int32)
    is_prompt = (request == prompt.request) & (prompt.length > 0)
    lengths = jnp.where(is_prompt, 0, requests.query_lengths)
    requests = requests._replace(query_lengths=lengths)
    return dataclasses.replace(call, requests=requests, plans={})


def _attend_prompt(call: Call, prompt: Prompt, attend: AttendContiguous) -> jax.Array:
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
    place = call.layer, blocks, slice(None), offsets

    def gather(stored: Stored) -> jax.Array:
        parts = {n: a.at[place].get(mode="clip") for n, a in stored.parts.items()}
        return multiply_out(*stored.format.get(parts))

    assert pools.stored_values is not None
    keys, values = gather(pools.stored_keys), gather(pools.stored_values)
    # What lies behind the prompt's end may be anything.
    is_broken = ~jnp.all(jnp.isfinite(keys) & jnp.isfinite(values), axis=2)  # [R, K]
    left_out = is_broken | (token >= prompt.length)[:, None]
    keys, values = (
        jnp.where(left_out[..., None], 0.0, each).astype(queries.dtype)
        for each in (keys, values)
    )
    output = attend(queries, keys, values)
    first = jnp.min(jnp.where(is_broken, token[:, None], call.num_rows), axis=0)
    sees = jnp.repeat(token[:, None] >= first[None, :], call.heads_per_kv, axis=1)
    return jnp.where(sees[..., None], jnp.nan, output)

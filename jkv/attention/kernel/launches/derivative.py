"""The derivative by kernels: one over tiles of rows, one over tiles of tokens.

As in FlashAttention-2 (arXiv 2307.08691) both kernels compute the scores, so that each
gradient is summed by the program that writes it, in a fixed order. Additional memory:
copies of the rows without non-finite numbers, and three integers per column of the
requests' tables.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jkv.attention.backend import (
    Call,
    Cotangents,
    Gradients,
    check_call,
    shape_gradients,
)
from jkv.attention.kernel import backend
from jkv.attention.kernel.bodies.query_gradients import (
    differentiate_queries,
    isolate_queries,
)
from jkv.attention.kernel.bodies.token_gradients import (
    PoolGradients,
    TokenOperands,
    differentiate_tokens,
)
from jkv.attention.kernel.launches.attention import find_compilation, make_operands
from jkv.attention.kernel.tiles.table import Backward
from jkv.attention.kernel.tiles.variant import (
    Variant,
    count_joined,
    query_variant,
    token_variant,
)
from jkv.attention.kernel.work.cutting import list_prefill_work, size_prefill_work
from jkv.attention.kernel.work.readers import list_readers


def differentiate_kernel(
    call: Call, cotangents: Cotangents, *, tuning: Backward, way: backend.Way
) -> Gradients:
    """Return the cotangents of the queries and, for float pools, of the pools."""
    check_call(call)
    launch = functools.partial(_launch_all, tuning=tuning, way=way)
    given, shapes = (call, cotangents), shape_gradients(call)
    return backend.defer(launch, given, shapes, way)


def _launch_all(
    call: Call, cotangents: Cotangents, *, tuning: Backward, way: backend.Way
) -> Gradients:
    call, cotangents = _leave_out_broken(call, cotangents)
    variant = query_variant(call, tuning, way=way)
    queries = _differentiate_queries(call, cotangents, variant)
    shapes = shape_gradients(call)
    if shapes.keys is None:
        return Gradients(queries, None, None)
    variant = token_variant(call, tuning, way=way)
    num_joined = count_joined(call.pools.block_size, tuning)
    pools = _differentiate_pools(call, cotangents, variant, num_joined)
    return Gradients(queries, pools.keys, pools.values)


def _leave_out_broken(call: Call, cotangents: Cotangents) -> tuple[Call, Cotangents]:
    """Zero rows with non-finite numbers, and mark them by a log-sum-exp of NaN.

    NaN then reaches the tokens that the row attends to, and no others: masked tokens
    have weight 0, and 0 * NaN would be NaN. An empty row has -inf.
    """
    queries, (d_output, lse, delta) = call.queries, cotangents
    is_whole = (lse < jnp.inf) & jnp.isfinite(delta)
    for rows in (queries, d_output):
        is_whole &= jnp.all(jnp.isfinite(rows), axis=-1)
    queries, d_output = (
        jnp.where(is_whole[..., None], rows, 0) for rows in (queries, d_output)
    )
    lse = jnp.where(is_whole, lse, jnp.nan)
    call = dataclasses.replace(call, queries=queries)
    return call, Cotangents(d_output, lse, delta)


def _differentiate_queries(
    call: Call, cotangents: Cotangents, variant: Variant
) -> jax.Array:
    """Return f32[R, H, D], zeros for rows without a request."""
    tile_rows = variant.row_tokens
    sizes = size_prefill_work(call.num_rows, call.num_requests, tile_rows, min_rows=1)
    listed = list_prefill_work(call.requests, sizes, min_rows=1)
    operands = make_operands(call, listed.work, variant)
    queries = jnp.zeros(call.queries.shape, jnp.float32)
    kernels = {
        "jkv_query_gradients": differentiate_queries,
        "jkv_isolate_queries": isolate_queries,
    }
    for name, kernel in kernels.items():
        (queries,) = backend.launch(
            name,
            functools.partial(kernel, variant=variant),
            (operands, cotangents, queries),
            (jax.ShapeDtypeStruct(queries.shape, queries.dtype),),
            grid=(sizes.num_entries * variant.head_tiles, 1),
            compilation=find_compilation(variant, is_rare=kernel is isolate_queries),
            in_place=True,
        )
    return queries


def _differentiate_pools(
    call: Call, cotangents: Cotangents, variant: Variant, num_joined: int
) -> PoolGradients:
    """Return the gradients of float pools, zeros for slots that no row attends to."""
    pools, requests = call.pools, call.requests
    readers = list_readers(call, num_joined)
    operands = TokenOperands(
        readers=readers,
        query_starts=requests.query_starts,
        query_lengths=requests.query_lengths,
        context_lengths=requests.context_lengths,
        layer=call.layer[None],
        scale=call.scale[None],
        window=None if call.window is None else call.window[None],
        part=None if call.part is None else call.part[None],
        queries=call.queries,
        keys=pools.keys,
        values=pools.values,
        cotangents=cotangents,
    )
    zeros = PoolGradients(
        jnp.zeros_like(pools.keys),
        None if pools.values is None else jnp.zeros_like(pools.values),
    )
    tiles = -(-pools.block_size // variant.tile.tokens)  # of a block, or one of some
    gradients: PoolGradients = backend.launch(
        "jkv_token_gradients",
        functools.partial(differentiate_tokens, variant=variant),
        (operands, zeros),
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), zeros),
        grid=(readers.first.shape[0] * tiles, pools.num_kv_heads),
        compilation=find_compilation(variant),
        in_place=True,
    )
    return gradients

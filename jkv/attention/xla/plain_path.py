"""The fast path without a custom kernel: loops over gathered chunks of blocks.

Calls whose contexts are all small go through `small_calls.py` instead. Here requests
of one row go through `decode.py`, the others through `prefill.py`; each loop
makes no trip when it has no work.

Decoding is bound by reading the keys and values once. Without a kernel XLA cannot
multiply out of scattered blocks: it copies a chunk of them into the cache and reads it
there. Of the processor time of 16 sequences of 1000 tokens (8 kv heads of 64, float32,
JAX 0.10.2, two cores of an AMD EPYC) that copy takes about 62%, the two products 13%,
softmax, joining and the dispatch of small operations 25%; a plain `jnp.sum` over as
many bytes takes 35 to 45% of the whole. With four query heads per kv head the products
take about half of the time.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jkv.attention.call import Call, check_call
from jkv.attention.xla.decode import attend_decode
from jkv.attention.xla.prefill import attend_prefill


def attend_xla(call: Call) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the output's dtype and the log-sum-exp, f32[R, H]."""
    return attend_by_head(call, _attend_requests)


def _attend_requests(call: Call, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Take requests of one row piece by piece, others tile by tile."""
    output, lse = attend_decode(call, queries)
    if call.is_decoding:
        return output, lse
    return attend_prefill(call, queries, output, lse)


def attend_by_head(
    call: Call, attend: Callable[[Call, jax.Array], tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array]:
    """Scale the queries, f32[R, K, G, D], and join the heads of what is found."""
    check_call(call)
    output, lse = attend(call, scale_queries(call))
    by_head = call.num_rows, call.num_heads
    output = output.reshape(*by_head, -1).astype(call.output_dtype)
    return output, lse.reshape(by_head)


def scale_queries(call: Call) -> jax.Array:
    """Return the scaled queries by kv head, f32[R, K, G, D]."""
    scaled = call.queries.astype(jnp.float32) * call.scale
    return scaled.reshape(call.num_rows, call.pools.num_kv_heads, call.heads_per_kv, -1)

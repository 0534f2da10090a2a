"""The fast path without a custom kernel: loops over gathered chunks of blocks.

Requests of one row go through `decode.py`, the others through `prefill.py`; each loop
makes no trip when it has no work.

Decoding is bound by reading the keys and values once. Without a kernel XLA cannot
multiply out of scattered blocks: it copies a chunk of them into the cache and reads it
there. Of the processor time of 16 sequences of 1000 tokens (8 kv heads of 64, float32,
JAX 0.10.2, two cores of an AMD EPYC) that copy takes about 62%, the two products 13%,
softmax, joining and the dispatch of small operations 25%; a plain `jnp.sum` over as
many bytes takes 35 to 45% of the whole. With four query heads per kv head the products
take about half of the time.
"""

import jax
import jax.numpy as jnp

from jkv.attention.call import Call, check_call
from jkv.attention.xla.decode import attend_decode
from jkv.attention.xla.prefill import attend_prefill


def attend_xla(call: Call) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the queries' dtype and the log-sum-exp, f32[R, H]."""
    check_call(call)
    queries = scale_queries(call)
    output, lse = attend_decode(call, queries)
    if not call.is_decoding:
        output, lse = attend_prefill(call, queries, output, lse)
    by_head = call.num_rows, call.num_heads
    output = output.reshape(*by_head, -1).astype(call.queries.dtype)
    return output, lse.reshape(by_head)


def scale_queries(call: Call) -> jax.Array:
    """Return the scaled queries by kv head, f32[R, K, G, D]."""
    scaled = call.queries.astype(jnp.float32) * call.scale
    return scaled.reshape(call.num_rows, call.pools.num_kv_heads, call.group, -1)

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

import functools

import jax
import jax.numpy as jnp

from jkv.attention.call import Constants, Requests
from jkv.attention.pools import Pools
from jkv.attention.xla.decode import attend_decode
from jkv.attention.xla.prefill import attend_prefill


@functools.partial(jax.jit, static_argnames=("constants",))
def attend_xla(
    queries: jax.Array,  # [R, H, D], not scaled
    pools: Pools,
    layer: jax.Array,  # i32[]
    requests: Requests,
    *,
    scale: jax.Array,  # f32[]
    window: jax.Array | None,  # i32[]
    constants: Constants,
    sinks: jax.Array | None,  # f32[H]
) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the queries' dtype and the log-sum-exp, f32[R, H]."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = pools.num_kv_heads
    scaled = queries.astype(jnp.float32) * scale
    scaled = scaled.reshape(num_rows, num_kv_heads, -1, head_dim)
    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, -1)
    output, lse = attend_decode(
        scaled,
        pools,
        layer,
        requests,
        window=window,
        soft_cap=constants.soft_cap,
        sinks=sinks,
    )
    if not constants.is_decoding:
        output, lse = attend_prefill(
            scaled,
            pools,
            layer,
            requests,
            output,
            lse,
            window=window,
            soft_cap=constants.soft_cap,
            sinks=sinks,
        )
    return (
        output.reshape(num_rows, num_heads, -1).astype(queries.dtype),
        lse.reshape(num_rows, num_heads),
    )

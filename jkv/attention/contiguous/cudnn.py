"""The backend: JAX's attention by cuDNN, for CUDA GPUs.

The only file that calls it. What it takes was read in JAX 0.10.2 and 0.12
(`jax._src.cudnn.fused_attention_stablehlo`). Its log-sum-exp comes rounded to the
queries' dtype: bfloat16 has steps of 1/16 between 8 and 16, so a weight would be wrong
by up to 3%. Nothing can be joined with that: rows come from here whole or not at all.
"""

import functools

import jax
import jax.numpy as jnp

from jkv.attention.call import Call


def attend_by_cudnn(
    queries: jax.Array,  # [Q, H, D]
    keys: jax.Array,  # [Q, K, D], in the queries' dtype
    values: jax.Array,  # [Q, K, D], likewise
    scale: float,
) -> jax.Array:
    """Return what each row sees of its own token and those before it, [Q, H, D]."""

    def attend(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        given = queries[None], keys[None], values[None]
        return jax.nn.dot_product_attention(
            *given, scale=scale, is_causal=True, implementation="cudnn"
        )[0]

    # JAX 0.10.2 has no rule for a `vmap` over queries alone.
    attend = jax.custom_batching.sequential_vmap(attend)
    output: jax.Array = attend(queries, keys, values)
    return output


def why_refused(call: Call, scale: float | None) -> str | None:
    """Say why cuDNN cannot serve a call's prompts, None if it can.

    Args:
      call: only shapes, dtypes and what is static matter.
      scale: on the scores, None if it may vary.
    """
    pools, head_dim = call.pools, call.queries.shape[2]
    if call.queries.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16, the queries are {call.queries.dtype}"
    if pools.values is None or pools.value_dim != head_dim:
        return "cuDNN wants keys and values apart, with one head dim"
    if call.soft_cap is not None:
        return "cuDNN has no soft cap"
    if call.sinks is not None:
        return "cuDNN has no sinks"
    if call.part is not None:
        return "the blocks are spread over devices, none of which has a whole prompt"
    if scale is None:
        return (
            "cuDNN is compiled for one scale: give a Python number, or on a mesh "
            "none, which stands for 1 / sqrt(D)"
        )
    # JAX says what else it has against it: no cuDNN, a head dim that the card lacks.
    queries = jax.ShapeDtypeStruct((8, call.num_heads, head_dim), call.queries.dtype)
    keys = jax.ShapeDtypeStruct((8, pools.num_kv_heads, head_dim), call.queries.dtype)
    try:
        jax.eval_shape(
            functools.partial(attend_by_cudnn, scale=1.0), queries, keys, keys
        )
    except (NotImplementedError, RuntimeError) as error:
        return str(error).rstrip(".")
    return None

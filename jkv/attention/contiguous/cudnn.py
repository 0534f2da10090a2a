"""cuDNN as a backend, by JAX's attention: for CUDA GPUs, by name.

The only file that calls it. What it takes was read in JAX 0.10.2 and 0.12
(`jax._src.cudnn.fused_attention_stablehlo`). Its log-sum-exp comes rounded to the
queries' dtype: bfloat16 has steps of 1/16 between 8 and 16, so a weight would be wrong
by up to 3%. Nothing can be joined with that: rows come from here whole or not at all.
"""

import dataclasses
import functools
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from jkv.attention.backend import Backend
from jkv.attention.call import Call
from jkv.attention.cards import Card
from jkv.attention.contiguous.prompts import attend_prompts


@dataclasses.dataclass(frozen=True)
class Cudnn(Backend):
    """cuDNN for a long prompt without a past, others for all other rows."""

    name: ClassVar[str] = "cudnn"
    platforms: ClassVar[tuple[str, ...]] = ("cuda",)
    has_lse: ClassVar[bool] = False

    others: tuple[Backend, ...]  # the last of which takes all calls
    scale: float | None = None  # what is compiled in; None if it may vary

    def with_scale(self, scale: float | None) -> Self:
        """Compile this scale in."""
        return dataclasses.replace(self, scale=scale)

    def why_not(self, call: Call, card: Card) -> str | None:
        """Say what cuDNN does not have."""
        del card
        pools, head_dim = call.pools, call.queries.shape[2]
        dtype = call.queries.dtype
        if dtype not in (jnp.bfloat16, jnp.float16):
            return f"cuDNN takes bfloat16 and float16, the queries are {dtype}"
        if pools.values is None or pools.value_dim != head_dim:
            return "cuDNN wants keys and values apart, with one head dim"
        if call.soft_cap is not None:
            return "cuDNN has no soft cap"
        if call.sinks is not None:
            return "cuDNN has no sinks"
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

    def attend(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        given = queries[None], keys[None], values[None]
        return jax.nn.dot_product_attention(
            *given, scale=scale, is_causal=True, implementation="cudnn"
        )[0]

    # JAX 0.10.2 has no rule for a `vmap` over queries alone.
    attend = jax.custom_batching.sequential_vmap(attend)
    output: jax.Array = attend(queries, keys, values)
    return output

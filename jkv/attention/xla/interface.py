"""Plain XLA as two backends, the defaults without a kernel.

Calls with small contexts only are computed by `tiles.py` side by side. In other calls
`decode.py` computes one-row requests and `tiles.py` all others as prompts; a loop
without work makes no trip.

Decoding is bound by reading the keys and values once. XLA cannot multiply scattered
blocks in place: it first copies a chunk of them into the cache. For 16 sequences of
1000 tokens (8 kv heads of 64, float32, JAX 0.10.2, two cores of an AMD EPYC) the copy
takes about 62% of the processor time, the two products 13%, and softmax, joining and
the dispatch of small operations 25%; a plain `jnp.sum` over as many bytes takes 35 to
45% of the total. With four query heads per kv head the products take about half.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jkv.attention.backend import (
    DEFAULT,
    Backend,
    Cotangents,
    DeviceType,
    Gradients,
    StepShape,
    find_gpu,
)
from jkv.attention.call import Call, Past, Pools, Requests, call_of, check_call
from jkv.attention.shared_prefixes import SharedPrefixes, find_shared_prefixes
from jkv.attention.xla.decode import attend_decode
from jkv.attention.xla.lanes import scale_queries
from jkv.attention.xla.shared import FEWEST, NAME
from jkv.attention.xla.tiles import (
    attend_by_position,
    attend_prompts,
    attend_side_by_side,
    is_small,
)


@dataclasses.dataclass(frozen=True)
class Xla(Backend):
    """Loops over gathered chunks of blocks."""

    name: ClassVar[str] = NAME
    default_platforms: ClassVar[tuple[str, ...]] = (DEFAULT,)
    is_by_position: ClassVar[bool] = True
    plan_nodes: ClassVar[tuple[type, ...]] = (SharedPrefixes,)

    def attend(self, call: Call, device: DeviceType) -> tuple[jax.Array, jax.Array]:
        """Compute attention in loops over the contexts."""
        del device
        if call.by_position:
            return attend_by_head(call, attend_by_position)
        return attend_xla(call)

    def why_not_derived(self, call: Call, device: DeviceType) -> str | None:
        """Return None, as every call has a derivative."""
        del call, device
        return None

    def differentiate(
        self, call: Call, cotangents: Cotangents, device: DeviceType
    ) -> Gradients:
        """Recompute the weights in the same loops."""
        from jkv.attention.xla.gradients import differentiate_plainly

        del device
        return differentiate_plainly(call, cotangents)

    def plan(
        self,
        pools: Pools,
        requests: Requests,
        reference_counts: jax.Array,
        step: StepShape,
        past: Past | None,
    ) -> SharedPrefixes | None:
        """Find shared prefixes, if decoding loops of the step would use them."""
        most = min(step.num_rows, requests.seq_ids.shape[0])
        if most < FEWEST or step.by_position or step.window is not None:
            return None
        # GPU kernels do not use this plan.
        if step.num_parts > 1 or find_gpu() or _is_small(pools, requests, step):
            return None
        if past is not None:  # which may end before a shared prefix
            return None
        return find_shared_prefixes(
            requests, reference_counts, block_size=step.part_size, fewest=FEWEST
        )


@dataclasses.dataclass(frozen=True)
class SideBySide(Xla):
    """All contexts of a small call at once, with fewer operations to compile."""

    name: ClassVar[str] = "xla_small"
    is_by_position: ClassVar[bool] = False
    plan_nodes: ClassVar[tuple[type, ...]] = ()
    plan = Backend.plan

    def why_not(self, call: Call, device: DeviceType) -> str | None:
        """Return a reason unless all contexts fit into one trip."""
        del device
        return None if is_small(call) else "the contexts do not fit side by side"

    def attend(self, call: Call, device: DeviceType) -> tuple[jax.Array, jax.Array]:
        """Compute attention over all contexts in one loop."""
        del device
        return attend_by_head(call, attend_side_by_side)


def attend_xla(call: Call) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the output's dtype and the log-sum-exp, f32[R, H]."""
    return attend_by_head(call, _attend_requests)


def _attend_requests(call: Call, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute one-row requests piece by piece, others tile by tile."""
    output, lse = attend_decode(call, queries)
    if call.is_decoding:
        return output, lse
    return attend_prompts(call, queries, (output, lse))


def attend_by_head(
    call: Call, attend: Callable[[Call, jax.Array], tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array]:
    """Scale and group the queries, f32[R, K, G, D], and ungroup the results."""
    check_call(call)
    output, lse = attend(call, scale_queries(call))
    by_head = call.num_rows, call.num_heads
    output = output.reshape(*by_head, -1).astype(call.output_dtype)
    return output, lse.reshape(by_head)


def _is_small(pools: Pools, requests: Requests, step: StepShape) -> bool:
    """Return True if the calls of a step are small."""
    rows: Any = jax.ShapeDtypeStruct((step.num_rows, 1, pools.head_dim), jnp.float32)
    most = 1 if step.is_decoding else None
    call = call_of(rows, pools)
    call = dataclasses.replace(call, requests=requests, max_query_length=most)
    return is_small(call)

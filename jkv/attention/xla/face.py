"""Plain XLA as two backends, which serve wherever no other does.

Calls whose contexts are all small go through `tiles.py` side by side. In others
requests of one row go through `decode.py`, the others through `tiles.py` as prompts;
each loop makes no trip when it has no work.

Decoding is bound by reading the keys and values once. Without a kernel XLA cannot
multiply out of scattered blocks: it copies a chunk of them into the cache and reads it
there. Of the processor time of 16 sequences of 1000 tokens (8 kv heads of 64, float32,
JAX 0.10.2, two cores of an AMD EPYC) that copy takes about 62%, the two products 13%,
softmax, joining and the dispatch of small operations 25%; a plain `jnp.sum` over as
many bytes takes 35 to 45% of the whole. With four query heads per kv head the products
take about half of the time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jkv.attention.backend import (
    DEFAULT,
    Backend,
    Card,
    Cotangents,
    Gradients,
    StepShape,
    find_gpu,
)
from jkv.attention.call import Call, Pools, Requests, call_of, check_call
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
    unasked: ClassVar[tuple[str, ...]] = (DEFAULT,)
    is_by_position: ClassVar[bool] = True
    plan_nodes: ClassVar[tuple[type, ...]] = (SharedPrefixes,)

    def attend(self, call: Call, card: Card) -> tuple[jax.Array, jax.Array]:
        """Go through the contexts in loops."""
        del card
        if call.by_position:
            return attend_by_head(call, attend_by_position)
        return attend_xla(call)

    def why_not_derived(self, call: Call, card: Card) -> str | None:
        """It differentiates everything."""
        del call, card
        return None

    def differentiate(
        self, call: Call, cotangents: Cotangents, card: Card
    ) -> Gradients:
        """Go through them again."""
        from jkv.attention.xla.gradients import differentiate_plainly

        del card
        return differentiate_plainly(call, cotangents)

    def plan(
        self,
        pools: Pools,
        requests: Requests,
        reference_counts: jax.Array,
        step: StepShape,
    ) -> SharedPrefixes | None:
        """Find what requests share, where loops would read it once."""
        most = min(step.num_rows, requests.seq_ids.shape[0])
        if most < FEWEST or step.by_position or step.window is not None:
            return None
        # A card's kernels have no use for it.
        if step.num_parts > 1 or find_gpu() or _is_small(pools, requests, step):
            return None
        return find_shared_prefixes(
            requests, reference_counts, block_size=step.part_size, fewest=FEWEST
        )


@dataclasses.dataclass(frozen=True)
class SideBySide(Xla):
    """All contexts of a small call together: fewer operations to compile."""

    name: ClassVar[str] = "xla_small"
    is_by_position: ClassVar[bool] = False
    plan_nodes: ClassVar[tuple[type, ...]] = ()
    plan = Backend.plan

    def why_not(self, call: Call, card: Card) -> str | None:
        """Say whether all contexts fit into one trip."""
        del card
        return None if is_small(call) else "the contexts do not fit side by side"

    def attend(self, call: Call, card: Card) -> tuple[jax.Array, jax.Array]:
        """Go through all contexts at once."""
        del card
        return attend_by_head(call, attend_side_by_side)


def attend_xla(call: Call) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the output's dtype and the log-sum-exp, f32[R, H]."""
    return attend_by_head(call, _attend_requests)


def _attend_requests(call: Call, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Take requests of one row piece by piece, others tile by tile."""
    output, lse = attend_decode(call, queries)
    if call.is_decoding:
        return output, lse
    return attend_prompts(call, queries, (output, lse))


def attend_by_head(
    call: Call, attend: Callable[[Call, jax.Array], tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array]:
    """Scale the queries, f32[R, K, G, D], and join the heads of what is found."""
    check_call(call)
    output, lse = attend(call, scale_queries(call))
    by_head = call.num_rows, call.num_heads
    output = output.reshape(*by_head, -1).astype(call.output_dtype)
    return output, lse.reshape(by_head)


def _is_small(pools: Pools, requests: Requests, step: StepShape) -> bool:
    """Return whether the calls of a step are."""
    rows: Any = jax.ShapeDtypeStruct((step.num_rows, 1, pools.head_dim), jnp.float32)
    most = 1 if step.is_decoding else None
    call = call_of(rows, pools)
    call = dataclasses.replace(call, requests=requests, max_query_length=most)
    return is_small(call)

"""Plain XLA as two backends, which serve wherever no other does."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jkv.attention.backend import Backend, StepShape
from jkv.attention.call import Call, Requests, call_of
from jkv.attention.cards import DEFAULT, Card, find_gpu
from jkv.attention.derivative import Cotangents, Gradients
from jkv.attention.pools import Pools
from jkv.attention.shared_prefixes import SharedPrefixes, find_shared_prefixes
from jkv.attention.xla.by_position import attend_by_position
from jkv.attention.xla.plain_path import attend_by_head, attend_xla
from jkv.attention.xla.shared import FEWEST, NAME
from jkv.attention.xla.small_calls import attend_side_by_side, is_small


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
        return attend_by_position(call) if call.by_position else attend_xla(call)

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


def _is_small(pools: Pools, requests: Requests, step: StepShape) -> bool:
    """Return whether the calls of a step are."""
    rows: Any = jax.ShapeDtypeStruct((step.num_rows, 1, pools.head_dim), jnp.float32)
    most = 1 if step.is_decoding else None
    call = call_of(rows, pools)
    call = dataclasses.replace(call, requests=requests, max_query_length=most)
    return is_small(call)

"""Plain XLA as two backends, which serve wherever no other does."""

import dataclasses
from typing import ClassVar

import jax

from jkv.attention.backend import Backend
from jkv.attention.call import Call
from jkv.attention.cards import DEFAULT, Card
from jkv.attention.derivative import Cotangents, Gradients
from jkv.attention.xla.by_position import attend_by_position
from jkv.attention.xla.gradients import differentiate_plainly
from jkv.attention.xla.plain_path import attend_by_head, attend_xla
from jkv.attention.xla.small_calls import attend_side_by_side, is_small


@dataclasses.dataclass(frozen=True)
class Xla(Backend):
    """Loops over gathered chunks of blocks."""

    name: ClassVar[str] = "xla"
    unasked: ClassVar[tuple[str, ...]] = (DEFAULT,)
    is_by_position: ClassVar[bool] = True

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
        del card
        return differentiate_plainly(call, cotangents)


@dataclasses.dataclass(frozen=True)
class SideBySide(Xla):
    """All contexts of a small call together: fewer operations to compile."""

    name: ClassVar[str] = "xla_small"
    is_by_position: ClassVar[bool] = False

    def why_not(self, call: Call, card: Card) -> str | None:
        """Say whether all contexts fit into one trip."""
        del card
        return None if is_small(call) else "the contexts do not fit side by side"

    def attend(self, call: Call, card: Card) -> tuple[jax.Array, jax.Array]:
        """Go through all contexts at once."""
        del card
        return attend_by_head(call, attend_side_by_side)

"""cuDNN as a backend: for CUDA, by name."""

import dataclasses
import functools
from typing import ClassVar, Self

import jax

from jkv.attention.backend import Backend
from jkv.attention.call import Call
from jkv.attention.cards import Card
from jkv.attention.contiguous.cudnn import attend_by_cudnn, why_refused
from jkv.attention.contiguous.prompts import attend_prompts


@dataclasses.dataclass(frozen=True)
class Cudnn(Backend):
    """cuDNN for a long prompt without a past, others for all other rows."""

    name: ClassVar[str] = "cudnn"
    platforms: ClassVar[tuple[str, ...]] = ("cuda",)
    has_lse: ClassVar[bool] = False

    others: tuple[Backend, ...]  # the last of which takes all calls
    scale: float | None = None  # what is compiled in, None for none

    def with_scale(self, scale: float | None) -> Self:
        """Compile this scale in."""
        return dataclasses.replace(self, scale=scale)

    def why_not(self, call: Call, card: Card) -> str | None:
        """Say what cuDNN does not have."""
        del card
        return why_refused(call, self.scale)

    def attend(self, call: Call, card: Card) -> tuple[jax.Array, jax.Array]:
        """Attend to the prompt by cuDNN, where there is one."""
        assert self.scale is not None  # or there was a reason
        other = next(one for one in self.others if one.why_not(call, card) is None)
        return attend_prompts(
            call,
            attend=functools.partial(other.attend, card=card),
            attend_contiguous=functools.partial(attend_by_cudnn, scale=self.scale),
        )

"""Versions of the weights: which ones a text's tokens and blocks are of.

Weights may change while texts run. Each token then has the version of the weights that
chose it, and the oldest version that any key or value in its context can be of.
Keeping what running texts have is the in-flight update of PipelineRL
(https://arxiv.org/abs/2509.19128); AReaL (https://arxiv.org/abs/2505.24298) computes it
again. Both need to know how old the parts of a text are.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jkv.serving.request.request import RequestState, Sample
from jkv.status import UsageError


class Update(NamedTuple):
    """New weights, and what becomes of what the old ones made."""

    params: Any
    draft_params: Any  # None leaves those of a draft model
    recompute: bool  # whether running texts are computed again
    keep_cached: bool  # whether what is cached is still found
    version: int | None  # None is the next one
    store_version: str | None  # of the weights in a store; None: their digest


class Versions:
    """The version of the weights, and of what can be found.

    Attributes:
      newest: of the weights that windows are started with.
      oldest_found: no block that can be found is of older ones.
    """

    def __init__(self) -> None:
        self.newest = self.oldest_found = 0

    def check(self, update: Update) -> None:
        """Refuse an update that says two things."""
        if update.recompute and update.keep_cached:
            raise UsageError(
                "recompute=True would find the old blocks again with keep_cached=True; "
                "choose one of them"
            )
        if update.version is not None and update.version <= self.newest:
            raise UsageError(
                f"version must be above {self.newest}, that of the weights there are, "
                f"got {update.version}"
            )

    def advance(self, update: Update) -> None:
        self.newest = self.newest + 1 if update.version is None else update.version
        if not update.keep_cached:
            self.oldest_found = self.newest

    def begin(self, samples: Iterable[Sample]) -> None:
        """Note what samples can find that compute now from the beginning."""
        for sample in samples:
            sample.oldest_version = self.oldest_found


def has_begun(sharing: list[Sample]) -> bool:
    """Return whether samples of one prompt can have a block.

    One that was preempted has none, unless others computed the prompt that it shares.
    """
    if len(sharing) == 1:
        return sharing[0].stage == RequestState.RUNNING
    return any(s.stage != RequestState.WAITING or s.tokens for s in sharing)

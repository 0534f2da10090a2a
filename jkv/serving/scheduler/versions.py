"""Versions of the weights behind a sequence's tokens, keys and values.

Weights may change while sequences run. Each token records the version that produced it,
and the oldest possible version of the keys and values in its context. Keeping the cache
of running sequences is the in-flight update of PipelineRL
(https://arxiv.org/abs/2509.19128); AReaL (https://arxiv.org/abs/2505.24298) recomputes
it. Both need the ages of a sequence's parts.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jkv.serving.request.state import RequestStatus, Sample
from jkv.status import UsageError


class Update(NamedTuple):
    """New weights, and the treatment of blocks computed by the old ones."""

    params: Any
    draft_params: Any  # None keeps the draft model's
    recompute: bool  # preempt and recompute running sequences
    keep_cached: bool  # keep the prefix index
    version: int | None  # None increments the last one
    store_version: str | None  # of the weights in a store; None: a digest


class Versions:
    """Version of the weights, and lower bound for cached blocks.

    Attributes:
      newest: version of the weights of new windows.
      oldest_found: oldest possible version of a cached block.
    """

    def __init__(self) -> None:
        self.newest = self.oldest_found = 0

    def check(self, update: Update) -> None:
        """Raise for an inconsistent update."""
        if update.recompute and update.keep_cached:
            raise UsageError(
                "got recompute=True and keep_cached=True, which would hit the old "
                "blocks again; pass one of them"
            )
        if update.version is not None and update.version <= self.newest:
            raise UsageError(
                f"version must be > {self.newest}, the current version, got "
                f"{update.version}"
            )

    def advance(self, update: Update) -> None:
        self.newest = self.newest + 1 if update.version is None else update.version
        if not update.keep_cached:
            self.oldest_found = self.newest

    def begin(self, samples: Iterable[Sample]) -> None:
        """Set the version bound of samples that start computing now."""
        for sample in samples:
            sample.oldest_version = self.oldest_found


def has_begun(sharing: list[Sample]) -> bool:
    """Return True if samples of one prompt can hold a block.

    A preempted sample has none, unless another one has computed their shared prompt.
    """
    if len(sharing) == 1:
        return sharing[0].stage == RequestStatus.RUNNING
    return any(s.stage != RequestStatus.WAITING or s.tokens for s in sharing)

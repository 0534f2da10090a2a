"""What the host reads after a window."""

from typing import NamedTuple

import jax
import numpy as np

from jkv.decoding.texts.results import FinishReason, Statistics
from jkv.serving.record import RequestState

# What `WindowReport.stages` counts.
STAGES = (RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED)

_WAITING = STAGES.index(RequestState.WAITING)
_REASONS = {int(reason): reason for reason in FinishReason}


class SequenceReport(NamedTuple):
    """What a window brought for a sequence."""

    tokens: list[int]  # new ones
    logprobs: list[float]  # theirs
    reason: FinishReason
    stage: RequestState


class WindowReport(NamedTuple):
    """All of a window; N sequences, at most U new tokens of each."""

    tokens: jax.Array  # i32[N, U], new ones
    logprobs: jax.Array  # f32[N, U], theirs
    counts: jax.Array  # i32[N], how many
    reasons: jax.Array  # i32[N], `FinishReason`
    stages: jax.Array  # i32[N], index in STAGES
    statistics: Statistics  # of the window
    num_free_blocks: jax.Array  # i32[], of all groups of layers together

    def by_sequence(self) -> dict[int, SequenceReport]:
        """Return what each sequence got, but those that wait; arrays are in numpy.

        Most of those that wait have nothing new, and there may be many.
        """
        is_new = (self.counts > 0) | (self.reasons != FinishReason.RUNNING)
        rows = np.flatnonzero(is_new | (self.stages != _WAITING))
        arrays = self.counts, self.tokens, self.logprobs, self.reasons, self.stages
        lists = (np.asarray(array)[rows].tolist() for array in arrays)
        return {
            row: SequenceReport(
                tokens[:count], logprobs[:count], _REASONS[reason], STAGES[stage]
            )
            for row, count, tokens, logprobs, reason, stage in zip(
                rows.tolist(), *lists, strict=True
            )
        }

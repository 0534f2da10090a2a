"""Autoscaling of replicas by running and waiting sequences."""

import math
from typing import Any

from ray.serve.config import AutoscalingContext

# Start a replica before all places are used, since starting takes time.
SHARE_OF_PLACES = 0.8


class BySequences:
    """Policy that provides places for all sequences, plus a reserve."""

    def __init__(self, places: int):
        """Store the number of sequences that a replica runs at a time."""
        self._places = places

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the target number of replicas, and an empty state.

        Ray Serve clips it to the minimum and maximum, and delays changes
        (`upscale_delay_s`, `downscale_delay_s`).
        """
        sequences = sum(
            (context.aggregated_metrics or {}).get("sequences", {}).values()
        )
        # Include requests that are not assigned to a replica yet.
        sequences += context.total_queued_requests or 0.0
        return count_replicas(sequences, self._places), {}


def count_replicas(sequences: float, places: int) -> int:
    """Return the number of replicas with places for `sequences`, at least 1.

    Example:
      >>> [count_replicas(sequences, places=10) for sequences in (0, 7, 8, 9, 80)]
      [1, 1, 1, 2, 10]
    """
    return max(1, math.ceil(sequences / (SHARE_OF_PLACES * places)))

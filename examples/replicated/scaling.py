"""How many replicas there are: by the texts that engines run and that wait for them."""

import math
from typing import Any

from ray.serve.config import AutoscalingContext

# One more replica starts before all places are taken, as a start takes time.
SHARE_OF_PLACES = 0.8


class ByTexts:
    """As many replicas as have places for all texts, and a few places more."""

    def __init__(self, places: int):
        """Take how many texts a replica runs at one time."""
        self._places = places

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas to have, and nothing to remember.

        Ray Serve keeps it between the least and the most, and waits before it changes
        (`upscale_delay_s`, `downscale_delay_s`).
        """
        texts = sum((context.aggregated_metrics or {}).get("texts", {}).values())
        # Requests that no replica has taken yet are texts, too.
        texts += context.total_queued_requests or 0.0
        return count_replicas(texts, self._places), {}


def count_replicas(texts: float, places: int) -> int:
    """Return how many replicas have places for so many texts; one at least.

    Example:
      >>> [count_replicas(texts, places=10) for texts in (0, 7, 8, 9, 80)]
      [1, 1, 1, 2, 10]
    """
    return max(1, math.ceil(texts / (SHARE_OF_PLACES * places)))

"""What an engine has done, for Prometheus: its own client library makes the text.

The numbers are read when a registry collects them; nothing is counted twice.
"""

from collections.abc import Iterator
from typing import Protocol

from jkv.serving.scheduler.measures import BUCKETS, EngineStats, Times

try:
    import prometheus_client
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
except ImportError as error:  # pragma: no cover (the extra is not installed)
    raise ImportError(
        "jkv.serving.prometheus needs prometheus_client: pip install '.[metrics]' "
        "in the folder of jkv"
    ) from error


class HasStats(Protocol):
    """An engine, as far as its numbers go."""

    def stats(self) -> EngineStats:
        """Return a snapshot."""
        ...


_GAUGES = {
    "requests_waiting": ("waiting", "Requests that have not begun"),
    "requests_running": ("running", "Requests that run"),
    "requests_preempted": ("preempted", "Requests that gave their blocks back"),
    "blocks": ("num_blocks", "Blocks of the pool"),
    "blocks_free": ("free_blocks", "Blocks that are free, cached ones too"),
    "tokens_per_second": ("tokens_per_second", "New tokens, over ten seconds"),
    "prefix_hit_rate": ("hit_rate", "Share of tokens that the prefix cache had"),
    "weights_version": ("version", "Of the weights, counted by updates"),
    "texts_parked": ("parked", "Texts that wait to be resumed"),
    "parked_blocks": ("parked_blocks", "Blocks that parked texts hold, at most"),
    "parked_bytes": ("parked_bytes", "Bytes of parked texts on the host"),
    "acceptance_rate": ("acceptance_rate", "Share of guessed tokens that were right"),
}
_COUNTERS = {
    "requests_refused": ("refused", "Requests that were never taken in"),
    "prompt_tokens": ("prompt_tokens", "Prompt positions computed"),
    "generated_tokens": ("generated_tokens", "New tokens given to requests"),
    "recomputed_tokens": ("recomputed_tokens", "New tokens computed a second time"),
    "cached_tokens": ("cached_tokens", "Tokens found in the prefix cache"),
    "preemptions": ("preemptions", "Sequences that gave their blocks back"),
    "draft_tokens": ("draft_tokens", "Tokens that were guessed and computed"),
    "accepted_tokens": ("accepted_tokens", "Guessed tokens that were right"),
    "windows": ("num_windows", "Windows of steps"),
    "steps": ("num_steps", "Calls of the model"),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token", "From submit on"),
    "time_between_tokens_seconds": ("time_between_tokens", "Of a sequence"),
}


class EngineCollector:
    """Gives an engine's numbers to a registry of `prometheus_client`.

    Example:
      >>> import prometheus_client
      >>> from jkv.serving.prometheus import EngineCollector
      >>> from jkv.serving.scheduler.measures import Measures
      >>> class Idle:
      ...     def stats(self):
      ...         return Measures().read(8, 0.0, waiting=3, running=0, preempted=0)
      >>> registry = prometheus_client.CollectorRegistry()
      >>> registry.register(EngineCollector(Idle()))
      >>> registry.get_sample_value("jkv_requests_waiting")
      3.0
    """

    def __init__(self, engine: HasStats, prefix: str = "jkv"):
        """Take an engine, and what all names begin with."""
        self._engine, self._prefix = engine, prefix

    def collect(self) -> Iterator[Metric]:
        """Yield all numbers as they are now."""
        stats = self._engine.stats()
        for name, (field, text) in _GAUGES.items():
            yield GaugeMetricFamily(
                self._name(name), text, value=float(getattr(stats, field))
            )
        for name, (field, text) in _COUNTERS.items():
            yield CounterMetricFamily(
                self._name(name), text, value=float(getattr(stats, field))
            )
        ended = CounterMetricFamily(
            self._name("requests_ended"), "Requests by how they ended", labels=["state"]
        )
        for state in ("finished", "cancelled", "failed"):
            ended.add_metric([state], float(getattr(stats, state)))
        yield ended
        for name, (field, text) in _HISTOGRAMS.items():
            yield self._histogram(name, text, getattr(stats, field))

    def _histogram(self, name: str, text: str, times: Times) -> Metric:
        buckets = [
            (str(end), float(count))
            for end, count in zip(BUCKETS, times.counts, strict=True)
        ]
        buckets.append(("+Inf", float(times.number)))
        return HistogramMetricFamily(
            self._name(name), text, buckets=buckets, sum_value=times.total
        )

    def _name(self, name: str) -> str:
        return f"{self._prefix}_{name}"


def render(engine: HasStats) -> bytes:
    """Return the numbers of one engine as the text that Prometheus reads.

    Args:
      engine: the engine; to serve several, `register` a collector of each.
    """
    registry = prometheus_client.CollectorRegistry()
    registry.register(EngineCollector(engine))
    return prometheus_client.generate_latest(registry)

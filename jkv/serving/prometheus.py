"""Prometheus metrics of an engine, exported through `prometheus_client`.

Values are read from `Engine.stats` when a registry collects them.
"""

from collections.abc import Iterator, Mapping
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
        "jkv.serving.prometheus needs prometheus_client; run pip install '.[metrics]' "
        "in the folder of jkv"
    ) from error


class HasStats(Protocol):
    """An engine, or any object with its `stats`."""

    def stats(self) -> EngineStats:
        """Return a snapshot."""


_GAUGES = {
    "requests_waiting": ("waiting", "Queued requests"),
    "requests_running": ("running", "Running requests"),
    "requests_preempted": ("preempted", "Preempted requests"),
    "blocks": ("num_blocks", "Blocks of the pool"),
    "blocks_free": ("free_blocks", "Free blocks, including cached ones"),
    "tokens_per_second": ("tokens_per_second", "New tokens, over ten seconds"),
    "prefix_hit_rate": ("hit_rate", "Share of tokens hit in the prefix cache"),
    "weights_version": ("version", "Version of the weights"),
    "texts_parked": ("parked", "Parked sequences"),
    "parked_blocks": ("parked_blocks", "Blocks of parked sequences, upper bound"),
    "parked_bytes": ("parked_bytes", "Bytes of parked sequences on the host"),
    "store_bytes": ("store_bytes", "Bytes of spilled blocks in host memory"),
    "store_folder_bytes": ("store_folder_bytes", "Bytes of spilled blocks on disk"),
    "acceptance_rate": ("acceptance_rate", "Share of accepted draft tokens"),
}
_COUNTERS = {
    "requests_refused": ("refused", "Refused requests"),
    "prompt_tokens": ("prompt_tokens", "Prompt positions computed"),
    "generated_tokens": ("generated_tokens", "New tokens of requests"),
    "recomputed_tokens": ("recomputed_tokens", "New tokens recomputed"),
    "cached_tokens": ("cached_tokens", "Tokens hit in the prefix cache"),
    "spilled_blocks": ("spilled_blocks", "Blocks spilled to a store"),
    "restored_blocks": ("restored_blocks", "Blocks restored from a store"),
    "restored_tokens": ("restored_tokens", "Prompt tokens restored from a store"),
    "preemptions": ("preemptions", "Preempted sequences"),
    "draft_tokens": ("draft_tokens", "Draft tokens verified"),
    "accepted_tokens": ("accepted_tokens", "Draft tokens accepted"),
    "windows": ("num_windows", "Windows of decode steps"),
    "steps": ("num_steps", "Calls of the model"),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token", "From submission"),
    "time_between_tokens_seconds": ("time_between_tokens", "Per sequence"),
}


_KINDS = {GaugeMetricFamily: _GAUGES, CounterMetricFamily: _COUNTERS}


class EngineCollector:
    """Collector of an engine's metrics for a registry of `prometheus_client`.

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

    def __init__(
        self,
        engine: HasStats | Mapping[str, HasStats],  # an engine, or several by name
        prefix: str = "jkv",  # prefix of all metric names
        *,
        label: str = "engine",  # label name for the engine names, with several engines
    ):
        self._engines: dict[tuple[str, ...], HasStats]
        if isinstance(engine, Mapping):
            self._engines = {(name,): found for name, found in engine.items()}
            self._labels = [label]
        else:
            self._engines, self._labels = {(): engine}, []
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their current values."""
        found = {names: engine.stats() for names, engine in self._engines.items()}
        for kind, table in _KINDS.items():
            for name, (field, text) in table.items():
                family = kind(self._name(name), text, labels=self._labels)
                for names, stats in found.items():
                    family.add_metric(names, float(getattr(stats, field)))
                yield family
        ended = CounterMetricFamily(
            self._name("requests_ended"),
            "Finished requests by state",
            labels=[*self._labels, "state"],
        )
        for names, stats in found.items():
            for state in ("finished", "cancelled", "failed"):
                ended.add_metric([*names, state], float(getattr(stats, state)))
        yield ended
        for name, (field, text) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(self._name(name), text, labels=self._labels)
            for names, stats in found.items():
                times = getattr(stats, field)
                family.add_metric(names, _read_buckets(times), times.total)
            yield family

    def _name(self, name: str) -> str:
        return f"{self._prefix}_{name}"


def render(
    # an engine, or several by name
    engine: HasStats | Mapping[str, HasStats],
    *,
    label: str = "engine",  # label name for the engine names, with several engines
) -> bytes:
    """Return the metrics of one or several engines in Prometheus' text format."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(EngineCollector(engine, label=label))
    return prometheus_client.generate_latest(registry)


def _read_buckets(times: Times) -> list[tuple[str, float]]:
    buckets = [
        (str(end), float(count))
        for end, count in zip(BUCKETS, times.counts, strict=True)
    ]
    return [*buckets, ("+Inf", float(times.number))]

"""What an engine has done, for Prometheus: its own client library makes the text.

The numbers are read when a registry collects them; nothing is counted twice.
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
        "jkv.serving.prometheus needs prometheus_client: pip install '.[metrics]' "
        "in the folder of jkv"
    ) from error


class HasStats(Protocol):
    """An engine, as far as its numbers go."""

    def stats(self) -> EngineStats:
        """Return a snapshot."""


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
    "store_bytes": ("store_bytes", "Bytes of blocks in a store's memory"),
    "store_folder_bytes": ("store_folder_bytes", "Bytes of blocks in its folder"),
    "acceptance_rate": ("acceptance_rate", "Share of guessed tokens that were right"),
}
_COUNTERS = {
    "requests_refused": ("refused", "Requests that were never taken in"),
    "prompt_tokens": ("prompt_tokens", "Prompt positions computed"),
    "generated_tokens": ("generated_tokens", "New tokens given to requests"),
    "recomputed_tokens": ("recomputed_tokens", "New tokens computed a second time"),
    "cached_tokens": ("cached_tokens", "Tokens found in the prefix cache"),
    "spilled_blocks": ("spilled_blocks", "Cached blocks that left for a store"),
    "restored_blocks": ("restored_blocks", "Blocks that came back from a store"),
    "restored_tokens": ("restored_tokens", "Tokens of prompts that a store had"),
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


_KINDS = {GaugeMetricFamily: _GAUGES, CounterMetricFamily: _COUNTERS}


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

    def __init__(
        self,
        engine: HasStats | Mapping[str, HasStats],  # an engine, or several by name
        prefix: str = "jkv",  # what all names of numbers begin with
        *,
        label: str = "engine",  # of several engines: what their names are called
    ):
        self._engines: dict[tuple[str, ...], HasStats]
        if isinstance(engine, Mapping):
            self._engines = {(name,): found for name, found in engine.items()}
            self._labels = [label]
        else:
            self._engines, self._labels = {(): engine}, []
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Yield all numbers as they are now."""
        found = {names: engine.stats() for names, engine in self._engines.items()}
        for kind, table in _KINDS.items():
            for name, (field, text) in table.items():
                family = kind(self._name(name), text, labels=self._labels)
                for names, stats in found.items():
                    family.add_metric(names, float(getattr(stats, field)))
                yield family
        ended = CounterMetricFamily(
            self._name("requests_ended"),
            "Requests by how they ended",
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
    # an engine, or several by name, whose numbers have a label then
    engine: HasStats | Mapping[str, HasStats],
    *,
    label: str = "engine",  # of several: what their names are called
) -> bytes:
    """Return the numbers of engines as the text that Prometheus reads."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(EngineCollector(engine, label=label))
    return prometheus_client.generate_latest(registry)


def _read_buckets(times: Times) -> list[tuple[str, float]]:
    buckets = [
        (str(end), float(count))
        for end, count in zip(BUCKETS, times.counts, strict=True)
    ]
    return [*buckets, ("+Inf", float(times.number))]

"""Engine metrics, checked by hand and by a Prometheus parser."""

import numpy as np
import pytest

from jkv.decoding import Statistics
from jkv.serving.scheduler.measures import BUCKETS, Measures, Timer

pytestmark = pytest.mark.one_end


def window(**counts):
    numbers = Statistics.zeros().to_host() | counts
    return Statistics(np.array([*numbers.values()], np.int32))


def snapshot(measures, now):
    return measures.read(8, now, waiting=1, running=2, preempted=3)


def test_counters_exceed_32_bits():
    measures = Measures()
    for now in range(4):
        counts = window(
            num_steps=3,
            prompt_tokens=2**30,
            cached_tokens=2**30,
            peak_blocks=[3, 7, 7, 5][now],
            empty_slots=now,
        )
        measures.add_window(counts, 10, float(now))
    stats = snapshot(measures, 4.0)
    assert (stats.num_windows, stats.num_steps) == (4, 12)
    assert (stats.peak_blocks, stats.empty_slots) == (7, 1)
    assert stats.prompt_tokens == 2**32 and stats.hit_rate == 0.5
    # Thirty tokens since the first window was read.
    assert stats.tokens_per_second == 30 / 4
    assert snapshot(measures, 50.0).tokens_per_second == 0
    nothing = snapshot(Measures(), 0.0)
    assert nothing.hit_rate == nothing.acceptance_rate == 0


def test_times_are_counted_in_buckets():
    timer = Timer()
    for seconds, count in {0.001: 1, 0.0011: 2, 0.3: 6, 100.0: 1}.items():
        timer.add(seconds, count)
    times = timer.read()
    assert times.counts[:3] == (1, 3, 3) and times.counts[-1] == 9
    assert times.number == 10 and times.mean == pytest.approx(0.1 * 101.8032)
    assert times.quantile(0.5) == 0.5 and times.quantile(0.1) == BUCKETS[0]
    assert times.quantile(1.0) == float("inf")


def test_prometheus_parses_the_same_numbers():
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from jkv.serving.prometheus import render

    class Engine:
        def stats(self):
            return snapshot(measures, 1.0)

    measures = Measures()
    counts = dict(num_steps=4, preemptions=2, draft_tokens=8, accepted_tokens=6)
    measures.add_window(window(**counts), 7, 0.5)
    measures.failed, measures.free_blocks = 5, 6
    measures.first_token.add(0.03)
    measures.first_token.add(99.0)
    families = text_string_to_metric_families(render(Engine()).decode())
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    expected = {
        ("jkv_requests_waiting",): 1,
        ("jkv_requests_running",): 2,
        ("jkv_requests_preempted",): 3,
        ("jkv_requests_ended_total", "failed"): 5,
        ("jkv_requests_ended_total", "finished"): 0,
        ("jkv_blocks",): 8,
        ("jkv_blocks_free",): 6,
        ("jkv_generated_tokens_total",): 7,
        ("jkv_preemptions_total",): 2,
        ("jkv_steps_total",): 4,
        ("jkv_accepted_tokens_total",): 6,
        ("jkv_acceptance_rate",): 0.75,
        ("jkv_time_to_first_token_seconds_bucket", "0.02"): 0,
        ("jkv_time_to_first_token_seconds_bucket", "0.05"): 1,
        ("jkv_time_to_first_token_seconds_bucket", "+Inf"): 2,
        ("jkv_time_to_first_token_seconds_count",): 2,
        ("jkv_time_to_first_token_seconds_sum",): 99.03,
    }
    assert {name: found.get(name) for name in expected} == expected

"""Statistics of the engine: counts, rates and times as plain numbers."""

import bisect
import heapq
import itertools
from collections import deque
from typing import Any, NamedTuple

from jkv.decoding import Statistics
from jkv.serving.request.request import RequestState, RequestStatus, Sample

# Upper bounds of the histogram buckets, in seconds.
BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
)

# Window of a rate and its resolution, in seconds.
RATE_SECONDS = 10.0
_READING_SECONDS = 0.1

# Longest retry delay; clients such as OpenAI's wait no longer.
MOST_WAIT_SECONDS = 60.0
# Retry delay without a measured rate.
UNKNOWN_WAIT_SECONDS = 1.0


class Times(NamedTuple):
    """Histogram of durations."""

    # Cumulative: number of durations up to each bound in `BUCKETS`.
    counts: tuple[int, ...] = (0,) * len(BUCKETS)
    number: int = 0  # of all durations
    total: float = 0.0  # sum in seconds

    @property
    def mean(self) -> float:
        """Mean in seconds, 0 without any."""
        return self.total / self.number if self.number else 0.0

    def quantile(self, share: float) -> float:
        """Return the upper bound of the quantile's bucket; `share` is from 0 to 1."""
        bucket = bisect.bisect_left(self.counts, share * self.number)
        return BUCKETS[bucket] if bucket < len(BUCKETS) else float("inf")


class EngineStats(NamedTuple):
    """Snapshot of an engine's statistics.

    `waiting`, `running` and `preempted` are current numbers of requests. The other
    fields up to `num_steps` count since the engine was created.
    """

    waiting: int  # queued requests
    running: int  # requests with a sequence in the cache
    preempted: int  # requests to be recomputed
    finished: int  # requests that completed
    cancelled: int  # by the user, a closed iterator, or a timeout
    failed: int  # by an exception
    refused: int  # by `submit`
    prompt_tokens: int  # computed, including recomputation
    generated_tokens: int  # delivered to requests
    recomputed_tokens: int  # generated tokens computed again
    cached_tokens: int  # hit in the prefix cache
    preemptions: int  # of sequences
    draft_tokens: int  # verified
    accepted_tokens: int  # of `draft_tokens`
    num_windows: int  # completed windows
    num_steps: int  # calls of the model
    num_blocks: int  # of the pool, or of all pools with several groups of layers
    free_blocks: int  # after the last window, including cached ones
    peak_blocks: int  # most blocks in use
    empty_slots: int  # unused slots in the blocks of sequences, at that time
    tokens_per_second: float  # over the last ten seconds
    time_to_first_token: Times  # of a request, from submission
    time_between_tokens: Times  # of a sequence, averaged over each window
    version: int = 0  # of the weights, see `Engine.update_params`
    parked: int = 0  # parked sequences
    parked_blocks: int = 0  # upper bound of their blocks on the device
    parked_bytes: int = 0  # of their copies on the host, outside of a store
    spilled_blocks: int = 0  # offloaded to a store
    restored_blocks: int = 0  # from a store, including snapshots of states
    restored_tokens: int = 0  # prompt tokens restored from a store
    store_bytes: int = 0  # in the store's host memory
    store_folder_bytes: int = 0  # in the store's folder
    copy_seconds_per_token: float = 0.0  # to restore a token; 0 until measured
    compute_seconds_per_token: float = 0.0  # to prefill a token; 0 until measured

    @property
    def hit_rate(self) -> float:
        """Fraction of the required tokens that were hit in the prefix cache."""
        computed = self.prompt_tokens + self.recomputed_tokens
        return self.cached_tokens / max(1, self.cached_tokens + computed)

    @property
    def acceptance_rate(self) -> float:
        """Fraction of the draft tokens that were accepted."""
        return self.accepted_tokens / max(1, self.draft_tokens)


class Timer:
    """Mutable histogram of durations."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._total = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect.bisect_left(BUCKETS, seconds)] += count
        self._total += seconds * count

    def read(self) -> Times:
        upto = tuple(itertools.accumulate(self._counts))
        return Times(upto[:-1], upto[-1], self._total)


class Rate:
    """Events per second, over the last ten seconds."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def add(self, count: int, now: float) -> None:
        self._forget_old(now)
        if self._readings and now - self._readings[-1][0] < _READING_SECONDS:
            time, before = self._readings.pop()
            self._readings.append((time, before + count))
        else:
            self._readings.append((now, count))

    def read(self, now: float) -> float:
        """Return the rate, 0 with fewer than two readings."""
        self._forget_old(now)
        if len(self._readings) < 2:
            return 0.0
        # The first reading's events happened before the measured interval.
        number = sum(count for _, count in self._readings) - self._readings[0][1]
        return number / max(now - self._readings[0][0], 1e-9)

    def _forget_old(self, now: float) -> None:
        while self._readings and self._readings[0][0] < now - RATE_SECONDS:
            self._readings.popleft()


class QueueWait:
    """Estimate of the time until the queue has room."""

    def __init__(self) -> None:
        self._promised: list[float] = []  # heap of times for refused callers

    def find_wait(self, begun: Rate, now: float) -> float:
        """Return the seconds until the queue has room for this caller.

        Based on the current rate of admissions and earlier promises, at most
        `MOST_WAIT_SECONDS`; a second without recent admissions. The room is reserved
        for the caller.
        """
        while self._promised and self._promised[0] <= now:
            heapq.heappop(self._promised)
        rate = begun.read(now)
        seconds = (len(self._promised) + 1) / rate if rate else UNKNOWN_WAIT_SECONDS
        if seconds < MOST_WAIT_SECONDS:
            heapq.heappush(self._promised, now + seconds)
        return min(seconds, MOST_WAIT_SECONDS)


class Measures:
    """Counters of an engine."""

    def __init__(self) -> None:
        self.finished = self.cancelled = self.failed = self.refused = 0
        self.generated_tokens = self.num_windows = self.free_blocks = 0
        self.peak_blocks = self.empty_slots = 0
        self.first_token, self.next_token = Timer(), Timer()
        self._counts = Statistics.zeros().to_host()
        self.generated = Rate()  # tokens given to requests
        self.begun = Rate()  # admitted prompts

    def add_window(self, counts: Statistics, num_tokens: int, now: float) -> None:
        """Add a window's device counters and its number of delivered tokens."""
        for name, count in counts.to_host().items():
            self._counts[name] += count
        if counts.peak_blocks > self.peak_blocks:
            self.peak_blocks = int(counts.peak_blocks)
            self.empty_slots = int(counts.empty_slots)
        self.num_windows += 1
        self.generated_tokens += num_tokens
        self.generated.add(num_tokens, now)

    def add_times(
        self, state: RequestState, sample: Sample, count: int, now: float
    ) -> None:
        """Add the times of a sequence that received `count` tokens."""
        if not count:
            return
        if state.first_token is None:
            state.first_token = now
            self.first_token.add(now - state.submitted)
        if sample.newest is not None:
            self.next_token.add((now - sample.newest) / count, count)
        sample.newest = now

    def add_preemption(self) -> None:
        self._counts["preemptions"] += 1

    def add_end(self, state: RequestStatus) -> None:
        setattr(self, state.value, getattr(self, state.value) + 1)

    def read(self, num_blocks: int, now: float, **present: Any) -> EngineStats:
        """Return the statistics, with current values in `present`."""
        counts: dict[str, Any] = self._counts | vars(self)
        known = {name: n for name, n in counts.items() if name in EngineStats._fields}
        return EngineStats(
            **known,
            num_blocks=num_blocks,
            tokens_per_second=self.generated.read(now),
            time_to_first_token=self.first_token.read(),
            time_between_tokens=self.next_token.read(),
            **present,
        )

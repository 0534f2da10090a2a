"""What an engine has done: counts, rates and times, each a plain number."""

import bisect
import heapq
import itertools
from collections import deque
from typing import Any, NamedTuple

from jkv.decoding.texts.results import Statistics
from jkv.serving.request.request import Request, RequestState, Sample

# Upper ends of the buckets of times, in seconds.
BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
)

# Seconds over which a rate is taken, and those that are one reading for it.
RATE_SECONDS = 10.0
_READING_SECONDS = 0.1

# Most that one who is refused is told to wait: clients such as OpenAI's wait no longer.
MOST_WAIT_SECONDS = 60.0
# What is told where nothing was measured.
UNKNOWN_WAIT_SECONDS = 1.0


class Times(NamedTuple):
    """How long something took: a histogram."""

    # How many took at most each of `BUCKETS`; those that took longer are in `number`.
    counts: tuple[int, ...] = (0,) * len(BUCKETS)
    number: int = 0  # how many there were
    total: float = 0.0  # seconds of all together

    @property
    def mean(self) -> float:
        """Seconds of one, 0 if there were none."""
        return self.total / self.number if self.number else 0.0

    def quantile(self, share: float) -> float:
        """Return the end of the bucket that holds this share of them, from 0 to 1."""
        bucket = bisect.bisect_left(self.counts, share * self.number)
        return BUCKETS[bucket] if bucket < len(BUCKETS) else float("inf")


class EngineStats(NamedTuple):
    """A snapshot of an engine.

    Requests `waiting`, `running` and `preempted` are those of now. Everything up to
    `num_steps` counts from the engine's beginning.
    """

    waiting: int  # requests that have not begun
    running: int  # those with a sequence in the cache
    preempted: int  # those that gave their blocks back and go on later
    finished: int  # those that came to their end
    cancelled: int  # by the user, a consumer that left, or a deadline
    failed: int  # by an exception
    refused: int  # never taken in
    prompt_tokens: int  # computed, again after a preemption too
    generated_tokens: int  # given to requests
    recomputed_tokens: int  # generated ones computed a second time
    cached_tokens: int  # found in the prefix cache
    preemptions: int  # of sequences
    draft_tokens: int  # guessed and computed
    accepted_tokens: int  # those of them that were right
    num_windows: int  # that were read
    num_steps: int  # calls of the model
    num_blocks: int  # of the pool; with groups of layers, of all pools
    free_blocks: int  # of these, after the last window; cached ones too
    peak_blocks: int  # most in use
    empty_slots: int  # slots without a token in the blocks of sequences, then
    tokens_per_second: float  # over the last ten seconds
    time_to_first_token: Times  # of a request, from `submit` on
    time_between_tokens: Times  # of a sequence; those of one window share its time
    version: int = 0  # of the weights, as `Engine.update_params` counts them
    parked: int = 0  # texts that wait to be resumed
    parked_blocks: int = 0  # most that they hold on the device
    parked_bytes: int = 0  # of their copies on the host
    spilled_blocks: int = 0  # that left the cache for a store
    restored_blocks: int = 0  # that came back, snapshots of states too
    restored_tokens: int = 0  # of prompts, that the cache had not and a store had
    store_bytes: int = 0  # in the store's memory
    store_folder_bytes: int = 0  # in its folder
    copy_seconds_per_token: float = 0.0  # to bring one back; 0 until it was timed
    compute_seconds_per_token: float = 0.0  # to compute one of a prompt, likewise

    @property
    def hit_rate(self) -> float:
        """Share of the tokens needed in the cache that the prefix cache had."""
        computed = self.prompt_tokens + self.recomputed_tokens
        return self.cached_tokens / max(1, self.cached_tokens + computed)

    @property
    def acceptance_rate(self) -> float:
        """Share of the guessed tokens that were right."""
        return self.accepted_tokens / max(1, self.draft_tokens)


class Timer:
    """A histogram of times that grows."""

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
    """How many of something there are in a second, over the last ten."""

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
        """Return the rate, 0 without two readings."""
        self._forget_old(now)
        if len(self._readings) < 2:
            return 0.0
        # The first one's were there before the time began.
        number = sum(count for _, count in self._readings) - self._readings[0][1]
        return number / max(now - self._readings[0][0], 1e-9)

    def _forget_old(self, now: float) -> None:
        while self._readings and self._readings[0][0] < now - RATE_SECONDS:
            self._readings.popleft()


class NextRoom:
    """When there is room for one more that waits."""

    def __init__(self) -> None:
        self._promised: list[float] = []  # a heap of the times that others were told

    def find_wait(self, begun: Rate, now: float) -> float:
        """Return the seconds until a place is free that is promised to no other.

        By the rate of now at which requests leave the queue, also for those that were
        promised another before; at most `MOST_WAIT_SECONDS`. A second where none has
        begun lately.
        """
        while self._promised and self._promised[0] <= now:
            heapq.heappop(self._promised)
        rate = begun.read(now)
        seconds = (len(self._promised) + 1) / rate if rate else UNKNOWN_WAIT_SECONDS
        if seconds < MOST_WAIT_SECONDS:
            heapq.heappush(self._promised, now + seconds)
        return min(seconds, MOST_WAIT_SECONDS)


class Measures:
    """The running counts of an engine."""

    def __init__(self) -> None:
        self.finished = self.cancelled = self.failed = self.refused = 0
        self.generated_tokens = self.num_windows = self.free_blocks = 0
        self.peak_blocks = self.empty_slots = 0
        self.first_token, self.next_token = Timer(), Timer()
        self._counts = dict.fromkeys(Statistics._fields, 0)
        self.generated = Rate()  # tokens given to requests
        self.begun = Rate()  # prompts that left the queue

    def add_window(self, counts: Statistics, num_tokens: int, now: float) -> None:
        """Note a window: what the device counted in it, and the tokens it brought."""
        for name, count in counts._asdict().items():
            self._counts[name] += int(count)
        if counts.peak_blocks > self.peak_blocks:
            self.peak_blocks = int(counts.peak_blocks)
            self.empty_slots = int(counts.empty_slots)
        self.num_windows += 1
        self.generated_tokens += num_tokens
        self.generated.add(num_tokens, now)

    def add_times(
        self, request: Request, sample: Sample, count: int, now: float
    ) -> None:
        """Note when a sequence got so many tokens."""
        if not count:
            return
        if request.first_token is None:
            request.first_token = now
            self.first_token.add(now - request.submitted)
        if sample.newest is not None:
            self.next_token.add((now - sample.newest) / count, count)
        sample.newest = now

    def add_preemption(self) -> None:
        self._counts["preemptions"] += 1

    def add_end(self, state: RequestState) -> None:
        setattr(self, state.value, getattr(self, state.value) + 1)

    def read(self, num_blocks: int, now: float, **present: Any) -> EngineStats:
        """Return all of it, with what holds now: requests by state, and the like."""
        counts: dict[str, Any] = self._counts | vars(self)
        told = {name: n for name, n in counts.items() if name in EngineStats._fields}
        return EngineStats(
            **told,
            num_blocks=num_blocks,
            tokens_per_second=self.generated.read(now),
            time_to_first_token=self.first_token.read(),
            time_between_tokens=self.next_token.read(),
            **present,
        )

"""Parking: retention of the KV cache of finished sequences during tool calls.

A parked sequence is its tokens and cache salt; `resume` submits them again. Its cached
blocks are kept like others: they get the highest retention class for a time, and are
copied to the host when that is over, or when requests could need them before. Both are
preferences: blocks that are lost are recomputed, with the same result.

The copies go to the engine's store, or else to a store of their own, from which only
resumed sequences are restored. Caches whose layers all have sliding windows have no
copies on the host (`jkv.tiers`).

A rolled sequence has dropped tokens, so no prefix of it can be cached: it is swapped
out to the host as it is, within the same bytes, and swapped in when it is resumed. If
its copy is lost, all of its tokens are recomputed, and drop the same ones.

Threads add, take and drop parked sequences under the engine's lock; the thread that
runs the steps does the work on the device between two windows.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from jkv.metadata.requests import Integers
from jkv.prefixes import evict_cached
from jkv.serving.device.loop import Loop
from jkv.serving.request.request import RequestState, RequestStatus, Sample
from jkv.serving.scheduler.retention import Keeping, NoOffloading, Offloading
from jkv.status import UsageError
from jkv.storage.swapped import Swapped
from jkv.tiers import BlockStore, copy_prefix, count_blank, restore, stores_tokens

UNLIMITED = 2**62  # bytes


@dataclasses.dataclass(eq=False, kw_only=True)
class Parked:
    """A parked sequence."""

    number: tuple[int, int]  # request number and sample index
    tokens: np.ndarray  # i32[P]
    salt: int
    spans: np.ndarray | None  # i32[P], end of each token's span; None: causal
    since: float  # time of parking
    sequence: int  # index on the device if it may have kept its row; -1: it has not
    is_new: bool = True  # True before the first `settle`
    is_copied: bool = False  # True if its blocks were copied to the host
    is_over: bool = False  # True if dropped
    resumed_by: RequestState | None = None

    def continue_spans(
        self, more: Integers | None, num_tokens: int
    ) -> np.ndarray | None:
        """Return the spans of the sequence and of `num_tokens` that follow it."""
        if self.spans is None and more is None:
            return None
        ends = np.full(len(self.tokens) + num_tokens, -1, np.int32)
        if self.spans is not None:
            ends[: len(self.spans)] = self.spans
        if more is not None:
            given = np.asarray(more)
            if given.shape != (num_tokens,):
                raise ValueError(
                    f"spans must have an end for each of {num_tokens} tokens, got "
                    f"shape {list(given.shape)}"
                )
            ends[len(self.tokens) :] = np.where(
                given >= 0, given + len(self.tokens), -1
            )
        return ends

    @property
    def has_begun(self) -> bool:
        """True if the resuming request has been admitted or has finished."""
        if self.resumed_by is None:
            return False
        waits = (s.stage == RequestStatus.WAITING for s in self.resumed_by.samples)
        return self.resumed_by.has_ended or not all(waits)


class Parking:
    """Parked sequences, including the ones being resumed."""

    def __init__(
        self,
        loop: Loop,
        keeping: Keeping,
        offloading: Offloading | NoOffloading,
        seconds: float,
        max_bytes: int | None,
        clock: Callable[[], float],
        lock: AbstractContextManager[Any],
    ):
        is_int = isinstance(max_bytes, int | np.integer | None)
        if not (is_int and seconds >= 0 and (max_bytes or 0) >= 0):
            raise UsageError(
                f"park_seconds must be >= 0 and max_parked_bytes an int >= 0, got "
                f"{seconds} and {max_bytes}"
            )
        self._loop, self._keeping, self._lock = loop, keeping, lock
        self._seconds, self._clock = seconds, clock
        self._storing = offloading if isinstance(offloading, Offloading) else None
        self._max_bytes = UNLIMITED if max_bytes is None else max_bytes
        self._own = BlockStore(self._max_bytes)
        self._swapped: dict[Parked, Swapped] = {}  # rolled ones, oldest first
        # Ordered by time of parking; a dict as an ordered set.
        self._parked: dict[Parked, None] = {}
        self._by_number: dict[tuple[int, int], Parked] = {}

    def __bool__(self) -> bool:
        """True if there is a sequence to settle, including resumed and dropped ones."""
        return bool(self._parked)

    @property
    def has_changes(self) -> bool:
        """True if a parked or dropped sequence has not been settled."""
        return any(each.is_over or each.is_new for each in list(self._parked))

    def add(self, state: RequestState, sample: Sample, sequence: int = -1) -> None:
        """Park a finished sequence, replacing an earlier one of the same number.

        `sequence` is its index on the device if it was marked before it finished.
        """
        number = state.request_id, sample.index
        self._give_up(self._by_number.get(number))
        tokens = state.tokens_of(sample)
        request = state.request
        parked = Parked(
            number=number,
            tokens=tokens,
            salt=request.salt,
            spans=request.spans,
            since=self._clock(),
            sequence=sequence,
        )
        self._parked[parked] = None
        self._by_number[number] = parked

    def take(self, request_id: int, sample: int) -> Parked:
        """Remove and return a parked sequence for a resuming request."""
        with self._lock:
            parked = self._by_number.pop((request_id, sample), None)
        if parked is None:
            raise KeyError(
                f"sample {sample} of request {request_id} must be parked, but it was "
                f"never parked, is unfinished, or was resumed or dropped; call park() "
                f"and wait for its results"
            )
        return parked

    def put_back(self, parked: Parked) -> None:
        """Restore a parked sequence after its request was refused."""
        with self._lock:
            other = self._by_number.setdefault(parked.number, parked)
            parked.is_over |= other is not parked

    def give_up(self, request_id: int) -> bool:
        """Drop the parked sequences of a request; return True if there were any."""
        numbers = [each for each in self._by_number if each[0] == request_id]
        for number in numbers:
            self._give_up(self._by_number[number])
        return bool(numbers)

    def give_up_all(self) -> None:
        with self._lock:
            for parked in list(self._by_number.values()):
                self._give_up(parked)

    def _give_up(self, parked: Parked | None) -> None:
        if parked is not None:
            parked.is_over = True
            del self._by_number[parked.number]

    def count(self) -> dict[str, int]:
        """Return the number of parked sequences, their device blocks and host bytes."""
        return {
            "parked": len(self._by_number),
            "parked_blocks": sum(
                sum(self._count_blocks(len(each.tokens)))
                for each in list(self._parked)
                if not (each.is_copied or each.is_over)
            ),
            "parked_bytes": self._own.nbytes + self._swapped_bytes,
        }

    # Between two windows.

    def settle(
        self,
        lengths: list[int],  # bounds of device sequences after the window
        dispatched: list[tuple[RequestState, int]],  # to be enqueued, as by `Queue`
    ) -> None:
        """Keep, copy and restore blocks before the next window."""
        for parked in list(self._parked):
            if parked.is_over or parked.has_begun:
                self._own.discard(parked.tokens, parked.salt)
                self._swapped.pop(parked, None)
                del self._parked[parked]
                continue
            is_new, parked.is_new = parked.is_new, False
            if is_new and not self._swap_out(parked):
                self._keeping.keep_now(parked.tokens, parked.salt, self._seconds)
                continue
            for state, first in dispatched:
                if state is parked.resumed_by:
                    self._restore(parked, state.samples[first])
        due = self._clock() - self._seconds
        waiting = [each for each in list(self._parked) if each.resumed_by is None]
        for parked in waiting:  # oldest first
            if not parked.is_copied and (
                parked.since <= due or not self._has_room(lengths)
            ):
                self._copy(parked)
        self._own.max_bytes = self._max_bytes - self._swapped_bytes

    def forget_blocks(self) -> None:
        """Drop the copies, which belong to older weights; keep the tokens."""
        self._own.clear()
        self._swapped.clear()
        self._loop.free_kept_rows()

    def forget_rows(self) -> None:
        """Recompute the sequences that have ended and are not copied yet."""
        for parked in self._parked:
            parked.sequence = -1

    @property
    def _swapped_bytes(self) -> int:
        return sum(each.nbytes for each in self._swapped.values())

    def _swap_out(self, parked: Parked) -> bool:
        """Swap out a sequence that has rolled; return True if it is on the host.

        Rolled sequences come before copies of cached blocks, since recomputing one
        costs its whole history.
        """
        if parked.sequence < 0:
            return False
        # The newest token is computed when the sequence is resumed.
        swapped = self._loop.take_out(parked.sequence, len(parked.tokens) - 1)
        if swapped is None or swapped.nbytes > self._max_bytes:
            return False
        self._swapped[parked] = swapped
        while self._swapped_bytes > self._max_bytes:
            del self._swapped[next(iter(self._swapped))]
        parked.is_copied = True
        return True

    def _copy(self, parked: Parked) -> None:
        """Copy a sequence's cached blocks to the host."""
        parked.is_copied = True
        if self._storing is not None:
            self._storing.copy(parked.tokens, parked.salt)
        elif stores_tokens(self._loop.cache):
            found = copy_prefix(self._loop.cache, parked.tokens, parked.salt)
            self._own.put(found)

    def _restore(self, parked: Parked, sample: Sample) -> None:
        """Restore a resuming sequence's blocks; the engine's store does it itself."""
        swapped = self._swapped.get(parked)
        if swapped is not None:
            sample.row = self._loop.put_in(swapped)
            return
        tokens, salt, cache = parked.tokens, parked.salt, self._loop.cache
        held, known = self._own.count(tokens, salt), self._loop.match(tokens, salt)
        if held <= known:
            return
        lacking = (held - known) // cache.block_size - int(count_blank(cache.metadata))
        if cache.metadata.block_numbers and lacking > 0:
            self._loop.cache = evict_cached(cache, lacking)
            # The eviction may have removed some.
            known = self._loop.match(tokens, salt)
        found = self._own.find(tokens, salt, skip=known)
        if found is not None:
            self._loop.cache, _ = restore(self._loop.cache, found, donate=True)

    def _has_room(self, lengths: list[int]) -> bool:
        """True if the pool has the blocks of requests and of parked sequences.

        Of the requests until the next window, and of sequences without a copy.
        """
        # A prompt may keep a row for its waiting samples.
        sizes = self._loop.sizes
        most = sizes.max_running + (sizes.config.num_samples > 1)
        longest = sorted(lengths, reverse=True)[:most]
        kept = [len(each.tokens) for each in list(self._parked) if not each.is_copied]
        needs = [self._count_blocks(length) for length in (*longest, *kept)]
        return not kept or all(
            sum(of_group) <= num_blocks
            for of_group, num_blocks in zip(
                zip(*needs, strict=True), self._loop.num_blocks, strict=True
            )
        )

    def _count_blocks(self, length: int) -> tuple[int, ...]:
        """Return an upper bound of a sequence's blocks in each group of layers."""
        size, most = self._loop.block_size, self._loop.cache.max_context_length
        columns = -(-min(length, most) // size.tokens)  # of a rolled one fewer
        return tuple(columns if m is None else min(columns, m) for m in size.most)

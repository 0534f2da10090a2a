"""Parking: retention of the KV cache of sequences during tool calls.

At first a parked sequence is pinned: an open sequence of the cache references its
cached blocks, so that the resuming prompt hits them. Later they are swapped out to the
host, as a `Swapped`, the longest parked first where blocks are short. Pinned blocks are
limited to the ones that running requests cannot need before the next window, so that
parking preempts no request. On return, blocks are swapped in and indexed again; without
them the sequence is recomputed, with the same result.

Threads add, take and drop parked sequences under the engine's lock; the thread that
runs the steps does the work on the device between two windows.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata.requests import Integers
from jkv.prefixes.recommitment import recommit
from jkv.serving.device.loop import Loop
from jkv.serving.request.state import RequestState, RequestStatus, Sample
from jkv.state import Cache
from jkv.status import Status
from jkv.storage.swapped import Swapped
from jkv.verbs.allocation import allocate, free
from jkv.verbs.swapping import swap_in, swap_out


class Pinned(NamedTuple):
    """Open sequence that holds the blocks of a parked one; device arrays."""

    seq_ids: jax.Array  # i32[1], -1 if the cache had no free row
    num_tokens: jax.Array  # i32[1], number of tokens hit


@dataclasses.dataclass(eq=False, kw_only=True)
class Parked:
    """A parked sequence and its blocks."""

    number: tuple[int, int]  # request number and sample index
    text: np.ndarray  # i32[P]
    salt: int
    spans: np.ndarray | None  # i32[P], end of each token's span; None: causal
    since: float  # time of parking
    stay: Pinned | Swapped | None = None  # its blocks; None if lost
    is_new: bool = True  # True before the first `settle`
    is_over: bool = False  # True if dropped
    resumed_by: RequestState | None = None

    def continue_spans(
        self, more: Integers | None, num_tokens: int
    ) -> np.ndarray | None:
        """Return the spans of the sequence and of `num_tokens` that follow it."""
        if self.spans is None and more is None:
            return None
        ends = np.full(len(self.text) + num_tokens, -1, np.int32)
        if self.spans is not None:
            ends[: len(self.spans)] = self.spans
        if more is not None:
            given = np.asarray(more)
            if given.shape != (num_tokens,):
                raise ValueError(
                    f"spans must have an end for each of {num_tokens} tokens, got "
                    f"shape {list(given.shape)}"
                )
            ends[len(self.text) :] = np.where(given >= 0, given + len(self.text), -1)
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
        seconds: float,
        max_bytes: int | None,
        clock: Callable[[], float],
        lock: AbstractContextManager[Any],
    ):
        if not seconds >= 0 or (max_bytes or 0) < 0:
            raise ValueError(
                f"park_seconds and max_parked_bytes must be >= 0, got "
                f"{seconds} and {max_bytes}"
            )
        self._loop, self._lock = loop, lock
        self._seconds, self._max_bytes, self._clock = seconds, max_bytes, clock
        # Ordered by time of parking; a dict as an ordered set.
        self._texts: dict[Parked, None] = {}
        self._by_number: dict[tuple[int, int], Parked] = {}

    def __bool__(self) -> bool:
        """True if there is a sequence to settle, including resumed and dropped ones."""
        return bool(self._texts)

    @property
    def has_changes(self) -> bool:
        """True if a parked or dropped sequence has not been settled."""
        return any(each.is_over or each.is_new for each in list(self._texts))

    def add(self, state: RequestState, sample: Sample) -> None:
        """Park a finished sequence, replacing an earlier one of the same number."""
        number = state.request_id, sample.index
        self._give_up(self._by_number.get(number))
        text = state.text_of(sample)
        request = state.request
        parked = Parked(
            number=number,
            text=text,
            salt=request.salt,
            spans=request.spans,
            since=self._clock(),
        )
        self._texts[parked] = None
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
        on_host = [each.stay for each in self._texts if isinstance(each.stay, Swapped)]
        return {
            "parked": len(self._by_number),
            "parked_blocks": sum(
                sum(self._count_blocks(len(e.text))) for e in self._pinned
            ),
            "parked_bytes": sum(each.nbytes for each in on_host),
        }

    # Between two windows.

    def settle(
        self,
        lengths: list[int],  # bounds of device sequences after the window
        dispatched: list[RequestState],  # requests to be enqueued there
    ) -> None:
        """Pin, swap and drop blocks before the next window."""
        for parked in list(self._texts):
            if parked.is_over or parked.has_begun:
                self._let_go(parked)
                del self._texts[parked]
            elif parked.is_new:
                parked.is_new, parked.stay = False, self._pin(parked)
            elif parked.resumed_by is not None and parked.resumed_by in dispatched:
                self._bring_back(parked)
        due = self._clock() - self._seconds
        for parked in self._find_idle():
            if parked.since <= due:
                self._move_to_host(parked)
        self._make_room(lengths)
        self._drop_beyond_most()

    def forget_blocks(self) -> None:
        """Drop all blocks, which belong to older weights; keep the tokens."""
        for parked in self._texts:
            self._let_go(parked)

    def lose_blocks(self) -> None:
        """Forget blocks on the device after the pool was rebuilt; keep host copies."""
        for parked in self._pinned:
            parked.stay = None

    @property
    def _pinned(self) -> list[Parked]:
        return [each for each in list(self._texts) if isinstance(each.stay, Pinned)]

    def _find_idle(self) -> Iterator[Parked]:
        """Return the pinned sequences not being resumed, oldest first."""
        return (parked for parked in self._pinned if parked.resumed_by is None)

    def _pin(self, parked: Parked) -> Pinned:
        """Open a sequence on the cached full blocks of a parked one."""
        text = self._loop.pad(parked.text)[None]
        salts = np.full((1,), parked.salt, np.int32)
        self._loop.cache, pinned = _pin(self._loop.cache, text, salts)
        return pinned

    def _unpin(self, pinned: Pinned) -> None:
        """Free the sequence; its blocks stay cached until evicted."""
        self._loop.cache, _ = free(self._loop.cache, pinned.seq_ids)

    def _bring_back(self, parked: Parked) -> None:
        """Pin a resuming sequence from its host copy, if the cache has room."""
        others = self._find_idle()
        while isinstance(swapped := parked.stay, Swapped):
            found = self._pin(parked)
            if int(found.num_tokens[0]) >= int(swapped.context_lengths[0]):
                parked.stay = found  # still cached
                return
            self._unpin(found)
            self._loop.cache, back = swap_in(self._loop.cache, swapped, donate=True)
            if int(back.status[0]) == Status.OK:
                text = self._loop.pad(parked.text)[None]
                self._loop.cache = _recommit(self._loop.cache, back.seq_ids, text)
                lengths = jnp.asarray(swapped.context_lengths)
                parked.stay = Pinned(back.seq_ids, lengths)
                return
            # Swap out sequences not being resumed; without any, this one is recomputed.
            other = next(others, None)
            if other is None:
                return
            self._move_to_host(other)

    def _move_to_host(self, parked: Parked) -> None:
        pinned = parked.stay
        assert isinstance(pinned, Pinned)
        if int(pinned.num_tokens[0]) == 0:
            self._let_go(parked)
        else:
            self._loop.cache, parked.stay = swap_out(self._loop.cache, pinned.seq_ids)

    def _let_go(self, parked: Parked) -> None:
        if isinstance(parked.stay, Pinned):
            self._unpin(parked.stay)
        parked.stay = None

    # Capacity.

    def _make_room(self, lengths: list[int]) -> None:
        """Swap out pinned sequences until no request can lack a block or a row."""
        for parked in self._find_idle():
            if self._has_room(lengths):
                return
            self._move_to_host(parked)
        # Blocks of resuming sequences become evictable, but usually stay cached.
        for parked in self._pinned:
            if not self._has_room(lengths):
                self._let_go(parked)

    def _has_room(self, lengths: list[int]) -> bool:
        """True if the requests have enough blocks and rows until the next window."""
        pinned = self._pinned
        # A prompt may keep a row for its waiting samples.
        sizes = self._loop.sizes
        most = sizes.max_running + (sizes.config.num_samples > 1)
        if pinned and len(pinned) + most > self._loop.num_rows:
            return False
        longest = sorted(lengths, reverse=True)[:most]
        needs = [self._count_blocks(length) for length in longest]
        needs += [self._count_blocks(len(each.text)) for each in pinned]
        return not pinned or all(
            sum(of_group) <= num_blocks
            for of_group, num_blocks in zip(
                zip(*needs, strict=True), self._loop.num_blocks, strict=True
            )
        )

    def _count_blocks(self, length: int) -> tuple[int, ...]:
        """Return an upper bound of a sequence's blocks in each group of layers."""
        size = self._loop.block_size
        columns = -(-length // size.tokens)
        return tuple(columns if m is None else min(columns, m) for m in size.most)

    def _drop_beyond_most(self) -> None:
        """Drop the oldest host copies beyond `max_bytes`."""
        if self._max_bytes is None:
            return
        stays = [(each, each.stay) for each in self._texts]
        on_host = [(e, stay) for e, stay in stays if isinstance(stay, Swapped)]
        left = sum(stay.nbytes for _, stay in on_host)
        for parked, stay in on_host:
            if left <= self._max_bytes:
                return
            left -= stay.nbytes
            parked.stay = None


@functools.partial(jax.jit, donate_argnames="cache")
def _pin(cache: Cache, texts: jax.Array, salts: jax.Array) -> tuple[Cache, Pinned]:
    cache, opened = allocate(cache, 0, tokens=texts, salts=salts)
    return cache, Pinned(opened.seq_ids, opened.num_cached)


_recommit = jax.jit(recommit, donate_argnames="cache")

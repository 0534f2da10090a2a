"""Parking: texts that wait for a tool keep what was computed of them.

For a while a parked text is pinned: a sequence holds what the prefix index has of it,
and the next prompt that begins with it finds the blocks. Then they go to the host, as a
`Swapped`, and the text that has been parked longest goes first where blocks could lack.
So they are only ever in blocks that the requests on the device cannot need before the
host looks again, and no request is preempted for them. What comes back becomes visible
in the index again; without it a text is computed, and says the same.

Threads add, take and give up texts under the engine's lock; what is done on the device
is done between two windows, by the thread that does the steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.prefixes.recommitment import recommit
from jkv.serving.device.loop import Loop
from jkv.serving.request.request import Request, RequestState, Sample
from jkv.state import Cache
from jkv.status import Status
from jkv.storage.swapped import Swapped
from jkv.verbs.allocation import allocate, free
from jkv.verbs.swapping import swap_in, swap_out


class Pinned(NamedTuple):
    """A sequence of the cache that holds a text's blocks; the host need not look."""

    seq_ids: jax.Array  # i32[1], -1 where the cache had no row for it
    num_tokens: jax.Array  # i32[1], tokens that were found


@dataclasses.dataclass(eq=False, kw_only=True)
class Parked:
    """A text that waits, and what there is of it."""

    number: tuple[int, int]  # of the request, and which of its samples
    text: np.ndarray  # i32[P]
    salt: int
    since: float  # when it was parked
    stay: Pinned | Swapped | None = None  # what there is of it beside its tokens
    is_new: bool = True  # whether nothing was done for it yet
    is_over: bool = False  # whether it was given up
    request: Request | None = None  # which resumes it

    @property
    def has_begun(self) -> bool:
        """Whether the request that resumes it has found its blocks, or ended."""
        if self.request is None:
            return False
        waits = (s.stage == RequestState.WAITING for s in self.request.samples)
        return self.request.has_ended or not all(waits)


class Parking:
    """The texts that are parked, and those on their way back."""

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
                f"park_seconds and max_parked_bytes must be 0 or more, got "
                f"{seconds} and {max_bytes}"
            )
        self._loop, self._lock = loop, lock
        self._seconds, self._max_bytes, self._clock = seconds, max_bytes, clock
        # In the order in which they were parked; a dict is a set with an order.
        self._texts: dict[Parked, None] = {}
        self._by_number: dict[tuple[int, int], Parked] = {}

    def __bool__(self) -> bool:
        """Whether there is a text, on its way back or given up lately, too."""
        return bool(self._texts)

    @property
    def has_changes(self) -> bool:
        """Whether a text was parked or given up that the device has not heard of."""
        return any(each.is_over or each.is_new for each in list(self._texts))

    def add(self, request: Request, sample: Sample) -> None:
        """Park a sequence that has ended, instead of what was parked of it before."""
        number = request.request_id, sample.index
        self._give_up(self._by_number.get(number))
        text = request.text_of(sample)
        parked = Parked(
            number=number, text=text, salt=request.salt, since=self._clock()
        )
        self._texts[parked] = None
        self._by_number[number] = parked

    def take(self, request_id: int, sample: int) -> Parked:
        """Return a text that a request is about to resume."""
        with self._lock:
            parked = self._by_number.pop((request_id, sample), None)
        if parked is None:
            raise KeyError(
                f"sample {sample} of request {request_id} is not parked: it was never, "
                f"it has not ended, or it was resumed or given up"
            )
        return parked

    def put_back(self, parked: Parked) -> None:
        """Go on keeping a text whose request was refused."""
        with self._lock:
            other = self._by_number.setdefault(parked.number, parked)
            parked.is_over |= other is not parked

    def give_up(self, request_id: int) -> bool:
        """Let the texts of a request go; return whether there were any."""
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
        """Return what is parked: texts, blocks on the device, bytes on the host."""
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
        lengths: list[int],  # tokens that sequences on the device can have after it
        dispatched: list[Request],  # that go there
    ) -> None:
        """Do what is to be done before the next window."""
        for parked in list(self._texts):
            if parked.is_over or parked.has_begun:
                self._let_go(parked)
                del self._texts[parked]
            elif parked.is_new:
                parked.is_new, parked.stay = False, self._pin(parked)
            elif parked.request is not None and parked.request in dispatched:
                self._bring_back(parked)
        due = self._clock() - self._seconds
        for parked in self._find_idle():
            if parked.since <= due:
                self._move_to_host(parked)
        self._make_room(lengths)
        self._drop_beyond_most()

    def forget_blocks(self) -> None:
        """Keep the texts alone: their blocks are of older weights."""
        for parked in self._texts:
            self._let_go(parked)

    def lose_blocks(self) -> None:
        """Note that the pool was made anew; what is on the host is there still."""
        for parked in self._pinned:
            parked.stay = None

    @property
    def _pinned(self) -> list[Parked]:
        return [each for each in list(self._texts) if isinstance(each.stay, Pinned)]

    def _find_idle(self) -> Iterator[Parked]:
        """Return what is pinned and not on its way back, the oldest first."""
        return (parked for parked in self._pinned if parked.request is None)

    def _pin(self, parked: Parked) -> Pinned:
        """Start to hold the full blocks that the prefix index has of a text."""
        text = self._loop.pad(parked.text)[None]
        salts = np.full((1,), parked.salt, np.int32)
        self._loop.cache, pinned = _pin(self._loop.cache, text, salts)
        return pinned

    def _unpin(self, pinned: Pinned) -> None:
        """Let blocks go; they are found until the pool hands them out."""
        self._loop.cache, _ = free(self._loop.cache, pinned.seq_ids)

    def _bring_back(self, parked: Parked) -> None:
        """Pin a text whose blocks are on the host, if the cache can have room."""
        others = self._find_idle()
        while isinstance(swapped := parked.stay, Swapped):
            found = self._pin(parked)
            if int(found.num_tokens[0]) >= int(swapped.context_lengths[0]):
                parked.stay = found  # nobody has taken them meanwhile
                return
            self._unpin(found)
            self._loop.cache, back = swap_in(self._loop.cache, swapped, donate=True)
            if int(back.status[0]) == Status.OK:
                text = self._loop.pad(parked.text)[None]
                self._loop.cache = _recommit(self._loop.cache, back.seq_ids, text)
                lengths = jnp.asarray(swapped.context_lengths)
                parked.stay = Pinned(back.seq_ids, lengths)
                return
            # Others have longer to wait; without any it is computed again.
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

    # Blocks that could lack.

    def _make_room(self, lengths: list[int]) -> None:
        """Move texts to the host until no request can lack a block or a row."""
        for parked in self._find_idle():
            if self._has_room(lengths):
                return
            self._move_to_host(parked)
        # What is on its way back is free then, and most likely found all the same.
        for parked in self._pinned:
            if not self._has_room(lengths):
                self._let_go(parked)

    def _has_room(self, lengths: list[int]) -> bool:
        """Whether the requests can have what they may need until the next look."""
        pinned = self._pinned
        # A prompt may be held for samples that wait.
        sizes = self._loop.sizes
        most = sizes.max_running + (sizes.steps.num_samples > 1)
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
        """Return the most blocks that a text has in each group of layers."""
        size = self._loop.block_size
        columns = -(-length // size.tokens)
        return tuple(columns if m is None else min(columns, m) for m in size.most)

    def _drop_beyond_most(self) -> None:
        """Forget the oldest copies on the host where they are too many bytes."""
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

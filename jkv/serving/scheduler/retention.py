"""Cached blocks between two windows: retention classes, and offloading to a store.

The device frees finished sequences in the lowest class. `Keeping` raises the cached
blocks of their sequences to the request's class, until they expire.

`Offloading` spills cached blocks to a store and restores them for prompts. Blocks are
spilled before their eviction, so that a fraction of the pool always holds no cached
block. For each prompt sent to the device, the store is searched first; blocks missing
in the cache are restored if copying is faster than computing.
"""

import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Callable

import jax
import numpy as np

from jkv.metadata import allocator
from jkv.metadata.ring import Keep
from jkv.prefixes import demote
from jkv.serving.device.loop import Loop
from jkv.serving.device.processes import SharedLoop
from jkv.serving.request.request import RequestState, RequestStatus, SaltNumbers, Sample
from jkv.state import Cache
from jkv.status import UsageError
from jkv.tiers import (
    BlockStore,
    Layout,
    Names,
    Spilled,
    check_stores_tokens,
    copy_prefix,
    count_blank,
    count_next,
    restore,
    take,
    warm_up,
)

FOREVER = 2**32 - 1  # as an expiry time


class Keeping:
    """Finished sequences to retain, and the expiry times of classes."""

    def __init__(self, loop: Loop, clock: Callable[[], float]):
        self._loop, self._clock = loop, clock
        # Seconds since 1970, for comparison between processes that share a store's
        # folder.
        self._start = time.time() - clock()
        self._new: list[tuple[np.ndarray, int, int, int]] = []
        self._due: set[int] = set()

    @property
    def has_changes(self) -> bool:
        """True if a finished sequence's class is not applied yet."""
        return bool(self._new)

    def add(self, state: RequestState, sample: Sample) -> None:
        """Schedule a finished sequence for retention."""
        tokens, until = state.tokens_of(sample), FOREVER
        if state.request.keep_seconds is not None:
            until = math.ceil(min(self._now + state.request.keep_seconds, FOREVER))
            self._due.add(until)
        self._new.append((tokens, state.request.salt, state.request.keep, until))

    def keep_now(self, tokens: np.ndarray, salt: int, seconds: float) -> None:
        """Raise a sequence's cached blocks to the highest class for some seconds."""
        highest = self._loop.num_classes - 1
        until = math.ceil(min(self._now + seconds, FOREVER))
        if highest and until < FOREVER:
            self._due.add(until)
        self._keep(tokens, salt, highest, until)

    def check_times(self, found: Spilled) -> Spilled:
        """Return restored blocks with their classes lowered where expired."""
        now = int(self._now)
        held = {node: each.lowered(now) for node, each in found.held.items()}
        times = {each.keep[1] for each in held.values() if each.keep and each.keep[0]}
        self._due |= times - {FOREVER}
        return dataclasses.replace(found, held=held)

    def take(self) -> Callable[[], None]:
        """Return a function to apply before the next window, without the lock."""
        new, self._new = self._new, []
        now = int(self._now)
        due = {time for time in self._due if time <= now}
        self._due -= due

        def settle() -> None:
            for tokens, salt, keep, until in new:
                self._keep(tokens, salt, keep, until)
            if due:
                self._loop.cache = demote(self._loop.cache, now)

        return settle

    def warm_up(self) -> None:
        """Compile the programs by retaining nothing."""
        if self._loop.num_classes > 1:
            self._keep(np.zeros(1, np.int32), 0, 0, 0)
            self._loop.cache = demote(self._loop.cache, 0)

    @property
    def _now(self) -> float:
        return self._start + self._clock()

    def _keep(self, tokens: np.ndarray, salt: int, keep: int, until: int) -> None:
        self._loop.cache = keep_sequence(
            self._loop.cache,
            self._loop.pad(tokens)[None],
            np.full((1,), salt, np.int32),
            Keep(np.full((1,), keep, np.int32), np.full((1,), until, np.uint32)),
        )


@functools.partial(jax.jit, donate_argnames="cache")
def keep_sequence(
    cache: Cache,
    tokens: jax.Array,  # i32[1, P], padded with -1; the last token never hits
    salts: jax.Array,  # i32[1], its cache salt
    keep: Keep,  # its class and expiry, [1]
) -> Cache:
    """Raise the class of a sequence's cached blocks, and mark them as just used."""
    metadata = cache.metadata
    found = metadata.index.find(metadata, tokens, salts)
    for number in metadata.block_numbers:
        block = found.groups[number].blocks[0, ::-1]  # children are evicted first
        metadata = allocator.renew(metadata, number, block, keep)
    return cache.with_metadata(metadata)


BLOCKS_PER_SPILL = 64  # at most, between two windows
# Timings of fewer prompt tokens are too noisy.
FEWEST_TIMED = 64
LEAST_GAIN = 0.1  # seconds that computing a prompt must save
FADING = 0.9  # decay of the copying time for each prompt computed instead


@dataclasses.dataclass
class _Pace:
    """Moving average of the seconds per token; 0 until measured."""

    seconds: float = 0.0
    num_timed: int = 0
    num_compiling: int = 0  # first timings to ignore, which include compilation

    @property
    def is_known(self) -> bool:
        return self.num_timed > self.num_compiling and self.seconds > 0

    def add(self, seconds: float, tokens: int) -> None:
        new = seconds / tokens
        self.seconds = 0.7 * self.seconds + 0.3 * new if self.is_known else new
        self.num_timed += 1


class NoOffloading:
    """Offloading without a store, which does nothing."""

    def settle(self, dispatched: list[RequestState], *, is_running: bool) -> None:
        """Do nothing."""

    def note_window(self, prompt_tokens: int, started: float, now: float) -> None:
        """Do nothing."""

    def warm_up(self) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""

    def begin_version(self, version: str | None, *, keep_cached: bool) -> None:
        """Do nothing."""

    def read(self) -> dict[str, float]:
        """Return no statistics."""
        return {}


class Offloading:
    """Offloading between a cache and its store."""

    def __init__(
        self,
        loop: Loop,
        store: BlockStore,
        share: float,
        version: str | None,  # of the weights; None: the store's, or a digest
        salt_numbers: SaltNumbers,
        keeping: Keeping,
    ):
        if isinstance(loop, SharedLoop):
            raise UsageError(
                "store is not supported on a mesh of several processes; omit it"
            )
        check_stores_tokens(loop.cache)
        if not 0 < share <= 1:
            raise UsageError(f"store_share must be > 0 and <= 1, got {share}")
        store.belong(Layout.of(loop.cache))
        self._loop, self._store, self._keeping = loop, store, keeping
        version = version or store.version or loop.digest_weights()
        self._names = Names(version, salt_numbers.name)
        sizes = [*loop.num_blocks]
        if num_places := loop.cache.metadata.index.num_snapshots:
            sizes.append(num_places)
        self._reserve = [max(int(size * share), 1) for size in sizes]
        # Number of cached blocks to spill, counted before the window in progress.
        self._leaving: jax.Array | None = None
        self._copying, self._computing = _Pace(num_compiling=1), _Pace()
        # Number of restored blocks by prompt, until its admission.
        self._awaited: dict[RequestState, int] = {}
        self._read = -math.inf  # time when the last window was read
        self._unaveraged = 0.0, 0  # seconds and tokens not yet averaged
        names = "spilled_blocks", "restored_blocks", "restored_tokens"
        self._done = dict.fromkeys(names, 0)

    def settle(self, dispatched: list[RequestState], *, is_running: bool) -> None:
        """Spill and restore blocks before the next window, which receives `dispatched`.

        A count requested while a window runs is ready only at its end; without new
        prompts, use the count requested before it.
        """
        states = dict.fromkeys(dispatched)
        if states or not is_running:
            cache = self._loop.cache
            size, most = cache.block_size, cache.max_context_length
            lengths = (min(len(each.request.tokens), most) for each in states)
            self._ask(sum(-(-length // size) for length in lengths))
        if lacking := self._find_lacking():
            self._spill(lacking)
        for state in states:
            self._restore(state)
        self._ask(0)

    def note_window(self, prompt_tokens: int, started: float, now: float) -> None:
        """Record when a window was read and its number of prompt tokens.

        It ran from its start, or from the end of the previous one. Windows with few
        prompt tokens are timed together.
        """
        if prompt_tokens:
            seconds, tokens = self._unaveraged
            seconds += now - max(started, self._read)
            tokens += prompt_tokens
            if tokens >= FEWEST_TIMED:
                self._computing.add(seconds, tokens)
                seconds, tokens = 0.0, 0
            self._unaveraged = seconds, tokens
        self._read = now

    def warm_up(self) -> None:
        """Compile the copies, by copying blocks onto themselves, and the look-ups."""
        self._spill(0)
        self._loop.cache = warm_up(self._loop.cache, 2 * BLOCKS_PER_SPILL)
        self._ask(0)
        self._loop.match(np.zeros(1, np.int32), 0)
        count_blank(self._loop.cache.metadata)

    def copy(self, tokens: np.ndarray, salt: int) -> None:
        """Copy the cached blocks of a sequence to the store."""
        self._store.put(copy_prefix(self._loop.cache, tokens, salt), names=self._names)

    def leave(self) -> None:
        """Spill all cached blocks."""
        while self._spill(BLOCKS_PER_SPILL):
            pass

    def begin_version(self, version: str | None, *, keep_cached: bool) -> None:
        """Name new weights, and drop or rename the old ones' blocks in host memory.

        With `keep_cached`, blocks get a version derived from both versions.
        """
        old = self._names.version
        new = version or self._store.version + self._loop.digest_weights()
        if keep_cached:
            new = hashlib.blake2b(f"{old}\0{new}".encode(), digest_size=16).hexdigest()
            self._store.rename(old, new)
        elif new != old:
            self._store.forget(old)
        self._names = self._names._replace(version=new)
        if version is not None:
            self._store.begin_version(version)

    def read(self) -> dict[str, float]:
        """Return spill counters, store sizes in bytes and seconds per token."""
        return {
            **self._done,
            "store_bytes": self._store.nbytes,
            "store_folder_bytes": self._store.folder_bytes,
            "copy_seconds_per_token": self._copying.seconds,
            "compute_seconds_per_token": self._computing.seconds,
        }

    def _ask(self, columns: int) -> None:
        """Start counting the cached blocks among the next to be evicted."""
        wanted = np.array(self._reserve, np.int32) + np.int32(columns)
        self._leaving = count_next(self._loop.cache.metadata, wanted)

    def _find_lacking(self) -> int:
        """Return the number of cached blocks to spill.

        Blocks restored for prompts not yet admitted are exempt.
        """
        if self._leaving is None:
            return 0
        self._awaited = {
            state: num
            for state, num in self._awaited.items()
            if state.status == RequestStatus.WAITING
        }
        awaited = sum(self._awaited.values())
        return max(int(np.asarray(self._leaving).max()) - awaited, 0)

    def _spill(self, num_blocks: int) -> int:
        """Spill cached blocks and snapshots; return their number."""
        num_left = 0
        for start in range(0, max(num_blocks, 1), BLOCKS_PER_SPILL):
            num = min(num_blocks - start, BLOCKS_PER_SPILL)
            self._loop.cache, spilled = take(self._loop.cache, num, BLOCKS_PER_SPILL)
            self._done["spilled_blocks"] += spilled.num_blocks
            self._store.put(spilled, names=self._names)
            num_left += spilled.num_blocks + spilled.num_snapshots
        return num_left

    def _restore(self, state: RequestState) -> None:
        """Restore the blocks of a prompt that the store has and the cache lacks."""
        # A prompt that rolls may be longer than the context.
        tokens = state.request.tokens[: self._loop.cache.max_context_length]
        salt = state.request.salt
        held = self._store.count(tokens, salt, names=self._names)
        if not held:
            return
        known = self._loop.match(tokens, salt)
        if held <= known:
            return
        if self._is_slower(held - known):
            self._copying.seconds *= FADING  # decay, so that copying is tried again
            return
        start = time.monotonic()
        metadata = self._loop.cache.metadata
        columns = -(-(held - known) // metadata.block_size)
        if (lacking := columns - int(count_blank(metadata))) > 0:
            self._spill(lacking)
            known = self._loop.match(tokens, salt)  # the spill may have removed some
        found = self._store.find(tokens, salt, skip=known, names=self._names)
        if found is None:
            return
        found = self._keeping.check_times(found)
        self._loop.cache, num = restore(self._loop.cache, found, donate=True)
        brought = self._loop.match(tokens, salt) - known
        self._done["restored_blocks"] += num
        self._awaited[state] = num
        if brought > 0:
            self._done["restored_tokens"] += brought
            self._copying.add(time.monotonic() - start, brought)

    def _is_slower(self, tokens: int) -> bool:
        """Return True if copying is known to be slower than computing.

        Timings of short prompts are rough, so a small difference is ignored.
        """
        copying, computing = self._copying, self._computing
        if not (copying.is_known and computing.is_known):
            return False
        return tokens * (copying.seconds - computing.seconds) > LEAST_GAIN

"""KV cache offloading: cached blocks are spilled to a store and restored for prompts.

Both happen between two windows. Blocks are spilled before their eviction, so that a
fraction of the pool always holds no cached block. For each prompt sent to the device,
the store is searched first; blocks missing in the cache are restored if copying is
faster than computing.
"""

import dataclasses
import hashlib
import math
import time

import jax
import numpy as np

from jkv.prefixes.verbs import match
from jkv.serving.device.loop import Loop
from jkv.serving.device.processes import SharedLoop
from jkv.serving.request.request import Domains
from jkv.serving.request.state import RequestState, RequestStatus
from jkv.serving.scheduler.keeping import Keeping
from jkv.status import UsageError
from jkv.tiers.choosing import count_blank, count_next
from jkv.tiers.restoring import restore, warm_up
from jkv.tiers.spilled import Layout
from jkv.tiers.spilling import check_has_texts, take
from jkv.tiers.store import BlockStore, Names

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


class NoStoring:
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


class Storing:
    """Offloading between a cache and its store."""

    def __init__(
        self,
        loop: Loop,
        store: BlockStore,
        share: float,
        version: str | None,  # of the weights; None: the store's, or a digest
        domains: Domains,
        keeping: Keeping,
    ):
        if isinstance(loop, SharedLoop):
            raise UsageError(
                "store is not supported on a mesh of several processes; omit it"
            )
        check_has_texts(loop.cache)
        if not 0 < share <= 1:
            raise UsageError(f"store_share must be > 0 and <= 1, got {share}")
        store.belong(Layout.of(loop.cache))
        self._loop, self._store, self._keeping = loop, store, keeping
        version = version or store.version or loop.digest_weights()
        self._names = Names(version, domains.name)
        sizes = [*loop.num_blocks]
        if num_places := loop.cache.metadata.index.num_places:
            sizes.append(num_places)
        self._reserve = [max(int(size * share), 1) for size in sizes]
        # Number of cached blocks to spill, counted before the window in progress.
        self._leaving: jax.Array | None = None
        self._copying, self._computing = _Pace(num_compiling=1), _Pace()
        # Number of restored blocks by prompt, until its admission.
        self._awaited: dict[RequestState, int] = {}
        self._read = -math.inf  # time when the last window was read
        self._untold = 0.0, 0  # seconds and tokens not yet averaged
        names = "spilled_blocks", "restored_blocks", "restored_tokens"
        self._done = dict.fromkeys(names, 0)

    def settle(self, dispatched: list[RequestState], *, is_running: bool) -> None:
        """Spill and restore blocks before the next window, which receives `dispatched`.

        A count requested while a window runs is ready only at its end; without new
        prompts, use the count requested before it.
        """
        states = dict.fromkeys(dispatched)
        if states or not is_running:
            size = self._loop.cache.block_size
            prompts = [state.request.tokens for state in states]
            self._ask(sum(-(-len(tokens) // size) for tokens in prompts))
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
            seconds, tokens = self._untold
            seconds += now - max(started, self._read)
            tokens += prompt_tokens
            if tokens >= FEWEST_TIMED:
                self._computing.add(seconds, tokens)
                seconds, tokens = 0.0, 0
            self._untold = seconds, tokens
        self._read = now

    def warm_up(self) -> None:
        """Compile the copies, by copying blocks onto themselves."""
        self._spill(0)
        self._loop.cache = warm_up(self._loop.cache, 2 * BLOCKS_PER_SPILL)

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
        return max(int(np.max(self._leaving)) - awaited, 0)

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
        tokens, salt = state.request.tokens, state.request.salt
        held = self._store.count(tokens, salt, names=self._names)
        if not held:
            return
        known = self._match(state)
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
            known = self._match(state)  # the spill may have removed some
        found = self._store.find(tokens, salt, skip=known, names=self._names)
        if found is None:
            return
        found = self._keeping.check_times(found)
        self._loop.cache, num = restore(self._loop.cache, found, donate=True)
        brought = self._match(state) - known
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

    def _match(self, state: RequestState) -> int:
        """Return the number of prompt tokens in the cache."""
        padded = np.full((1, self._loop.cache.max_context_length), -1, np.int32)
        padded[0, : len(state.request.tokens)] = state.request.tokens
        return int(match(self._loop.cache, padded, state.request.salt)[0])

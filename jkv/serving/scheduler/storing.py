"""Cached blocks that leave the pool for a store, and come back for prompts that wait.

Both are done between two windows. Blocks leave before the pool would hand them out, so
that a share of it always holds nothing. A prompt that goes to the device is looked up
in the store first: what the cache has not, and what takes less time to copy than to
compute, is restored.
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
from jkv.serving.request.ask import Domains
from jkv.serving.request.request import Request, RequestState
from jkv.serving.scheduler.keeping import Keeping
from jkv.status import UsageError
from jkv.tiers.choosing import count_blank, count_next
from jkv.tiers.restoring import restore, warm_up
from jkv.tiers.spilled import Layout
from jkv.tiers.spilling import check_has_texts, take
from jkv.tiers.store import BlockStore, Names

BLOCKS_PER_SPILL = 64  # at most, between two windows
# Fewer tokens of prompts tell little of how fast they are computed.
FEWEST_TIMED = 64
LEAST_GAIN = 0.1  # seconds that computing a prompt must save
FADING = 0.9  # of copying's pace, for each prompt that was computed instead


@dataclasses.dataclass
class _Pace:
    """Seconds that a token takes, the newest weighing most; 0 until one was timed."""

    seconds: float = 0.0
    num_timed: int = 0
    num_compiling: int = 0  # how many at first are too slow to tell

    @property
    def is_known(self) -> bool:
        return self.num_timed > self.num_compiling and self.seconds > 0

    def add(self, seconds: float, tokens: int) -> None:
        new = seconds / tokens
        self.seconds = 0.7 * self.seconds + 0.3 * new if self.is_known else new
        self.num_timed += 1


class NoStoring:
    """What goes between a cache and no store: nothing."""

    def settle(self, dispatched: list[Request], *, is_running: bool) -> None:
        """Do nothing."""

    def note_window(self, prompt_tokens: int, started: float, now: float) -> None:
        """Note nothing."""

    def warm_up(self) -> None:
        """Compile nothing."""

    def leave(self) -> None:
        """Let nothing leave."""

    def begin_version(self, version: str | None, *, keep_cached: bool) -> None:
        """Name nothing."""

    def read(self) -> dict[str, float]:
        """Return that nothing is known."""
        return {}


class Storing:
    """What goes between a cache and its store."""

    def __init__(
        self,
        loop: Loop,
        store: BlockStore,
        share: float,
        version: str | None,  # of the weights; None: the store's, or their digest
        domains: Domains,
        keeping: Keeping,
    ):
        if isinstance(loop, SharedLoop):
            raise UsageError(
                "a store is of one process: on a mesh of several, leave store= out"
            )
        check_has_texts(loop.cache)
        if not 0 < share <= 1:
            raise UsageError(f"store_share must be above 0 and at most 1, got {share}")
        store.belong(Layout.of(loop.cache))
        self._loop, self._store, self._keeping = loop, store, keeping
        version = version or store.version or loop.digest_weights()
        self._names = Names(version, domains.name)
        sizes = [*loop.num_blocks]
        if num_places := loop.cache.metadata.index.num_places:
            sizes.append(num_places)
        self._reserve = [max(int(size * share), 1) for size in sizes]
        # What should leave of the cache before the window under way.
        self._leaving: jax.Array | None = None
        self._copying, self._computing = _Pace(num_compiling=1), _Pace()
        # Blocks that were restored for prompts that have not begun.
        self._awaited: dict[Request, int] = {}
        self._read = -math.inf  # when the last window was
        self._untold = 0.0, 0  # seconds and tokens that are not in a pace yet
        names = "spilled_blocks", "restored_blocks", "restored_tokens"
        self._done = dict.fromkeys(names, 0)

    def settle(self, dispatched: list[Request], *, is_running: bool) -> None:
        """Do what is to be done before the next window, to which requests go.

        While one is running, what is asked of the cache waits for its end; where no
        prompt begins, what was asked before it does.
        """
        requests = dict.fromkeys(dispatched)
        if requests or not is_running:
            size = self._loop.cache.block_size
            self._ask(sum(-(-len(each.tokens) // size) for each in requests))
        if lacking := self._find_lacking():
            self._spill(lacking)
        for request in requests:
            self._restore(request)
        self._ask(0)

    def note_window(self, prompt_tokens: int, started: float, now: float) -> None:
        """Note that a window was read, when, and of how many tokens of prompts.

        It began when it was started, or when the one before it had ended. Windows of
        few tokens of prompts are timed together.
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
        """Compile what blocks are copied with, by copying some to where they are."""
        self._spill(0)
        self._loop.cache = warm_up(self._loop.cache, 2 * BLOCKS_PER_SPILL)

    def leave(self) -> None:
        """Let all that is cached leave for the store."""
        while self._spill(BLOCKS_PER_SPILL):
            pass

    def begin_version(self, version: str | None, *, keep_cached: bool) -> None:
        """Name new weights, and forget what memory holds of the old ones.

        Where that is kept, it gets a name that is of the new weights' after the old.
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
        """Return what was done, and what there is."""
        return {
            **self._done,
            "store_bytes": self._store.nbytes,
            "store_folder_bytes": self._store.folder_bytes,
            "copy_seconds_per_token": self._copying.seconds,
            "compute_seconds_per_token": self._computing.seconds,
        }

    def _ask(self, columns: int) -> None:
        """Ask how many cached blocks are among those that leave for so many columns."""
        wanted = np.array(self._reserve, np.int32) + np.int32(columns)
        self._leaving = count_next(self._loop.cache.metadata, wanted)

    def _find_lacking(self) -> int:
        """Return how many cached blocks should leave.

        What was restored for a prompt that has not begun stays, if it can.
        """
        if self._leaving is None:
            return 0
        self._awaited = {
            request: num
            for request, num in self._awaited.items()
            if request.state == RequestState.WAITING
        }
        awaited = sum(self._awaited.values())
        return max(int(np.max(self._leaving)) - awaited, 0)

    def _spill(self, num_blocks: int) -> int:
        """Let cached blocks leave, and snapshots; return how many were there."""
        num_left = 0
        for start in range(0, max(num_blocks, 1), BLOCKS_PER_SPILL):
            num = min(num_blocks - start, BLOCKS_PER_SPILL)
            self._loop.cache, spilled = take(self._loop.cache, num, BLOCKS_PER_SPILL)
            self._done["spilled_blocks"] += spilled.num_blocks
            self._store.put(spilled, names=self._names)
            num_left += spilled.num_blocks + spilled.num_snapshots
        return num_left

    def _restore(self, request: Request) -> None:
        """Bring back what the store has of a prompt, and the cache has not."""
        held = self._store.count(request.tokens, request.salt, names=self._names)
        if not held:
            return
        known = self._match(request)
        if held <= known:
            return
        if self._is_slower(held - known):
            self._copying.seconds *= FADING  # so that it is tried again
            return
        start = time.monotonic()
        metadata = self._loop.cache.metadata
        columns = -(-(held - known) // metadata.block_size)
        if (lacking := columns - int(count_blank(metadata))) > 0:
            self._spill(lacking)
            known = self._match(request)  # some of it may have left
        found = self._store.find(
            request.tokens, request.salt, skip=known, names=self._names
        )
        if found is None:
            return
        found = self._keeping.check_times(found)
        self._loop.cache, num = restore(self._loop.cache, found, donate=True)
        brought = self._match(request) - known
        self._done["restored_blocks"] += num
        self._awaited[request] = num
        if brought > 0:
            self._done["restored_tokens"] += brought
            self._copying.add(time.monotonic() - start, brought)

    def _is_slower(self, tokens: int) -> bool:
        """Return whether copying takes longer than computing, as far as both are known.

        Paces of short prompts are rough: what is nearly as fast is copied.
        """
        copying, computing = self._copying, self._computing
        if not (copying.is_known and computing.is_known):
            return False
        return tokens * (copying.seconds - computing.seconds) > LEAST_GAIN

    def _match(self, request: Request) -> int:
        """Return how many tokens of a prompt the cache has."""
        padded = np.full((1, self._loop.cache.max_context_length), -1, np.int32)
        padded[0, : len(request.tokens)] = request.tokens
        return int(match(self._loop.cache, padded, request.salt)[0])

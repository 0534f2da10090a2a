"""Retention classes of finished requests, with their expiry times.

The device frees finished sequences in the lowest class. Between two windows, this
module raises the cached blocks of their sequences to the request's class.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import jax
import numpy as np

from jkv.metadata import allocator
from jkv.metadata.ring import Keep
from jkv.prefixes.verbs import demote
from jkv.serving.device.loop import Loop
from jkv.serving.request.state import RequestState, Sample
from jkv.state import Cache
from jkv.tiers.spilled import Spilled

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
        text, until = state.text_of(sample), FOREVER
        if state.request.keep_seconds is not None:
            until = math.ceil(min(self._now + state.request.keep_seconds, FOREVER))
            self._due.add(until)
        self._new.append((text, state.request.salt, state.request.keep, until))

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
            for text, salt, keep, until in new:
                self._keep(text, salt, keep, until)
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

    def _keep(self, text: np.ndarray, salt: int, keep: int, until: int) -> None:
        self._loop.cache = keep_text(
            self._loop.cache,
            self._loop.pad(text)[None],
            np.full((1,), salt, np.int32),
            Keep(np.full((1,), keep, np.int32), np.full((1,), until, np.uint32)),
        )


@functools.partial(jax.jit, donate_argnames="cache")
def keep_text(
    cache: Cache,
    texts: jax.Array,  # i32[1, P], padded with -1; the last token never hits
    salts: jax.Array,  # i32[1], its cache salt
    keep: Keep,  # its class and expiry, [1]
) -> Cache:
    """Raise the class of a sequence's cached blocks, and mark them as just used."""
    metadata = cache.metadata
    found = metadata.index.find(metadata, texts, salts)
    for number in metadata.block_numbers:
        block = found.groups[number].blocks[0, ::-1]  # children are evicted first
        metadata = allocator.renew(metadata, number, block, keep)
    return cache.with_metadata(metadata)

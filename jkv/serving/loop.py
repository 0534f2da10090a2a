"""The generation on the device, and the windows of it that the host has not read."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.decoding.model import Model
from jkv.decoding.progress import count_free_blocks
from jkv.serving.book import Part
from jkv.serving.kept_programs import BoundProgram, KeptPrograms
from jkv.serving.programs import (
    Arrivals,
    EngineSizes,
    WindowReport,
    begin_empty,
    exchange,
    run_window,
)
from jkv.serving.record import EngineError
from jkv.state import Cache
from jkv.storage.placement import Placement, place
from jkv.verbs.prefixes import clear_prefixes

Progress = Callable[[str, int, int], object]


class Loop:
    """Cache and generation, of which each call makes the next.

    Attributes:
      cache: the newest value; what is computed on it may not be done yet.
      num_blocks: blocks that one sequence can find in each group of layers.
      block_size: how many of them a text takes.
      vocabulary: tokens that the model knows.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        cache: Cache,
        sizes: EngineSizes,
        kept: KeptPrograms | None,
    ):
        self._params, self._sizes, self.cache = params, sizes, cache
        static = {"model": model, "sizes": sizes}
        self._begin = BoundProgram(begin_empty, kept, static)
        self._exchange = BoundProgram(exchange, kept, {})
        self._run_window = BoundProgram(run_window, kept, static)
        state, _ = self._begin.find_shapes(params=params, cache=cache)
        self.vocabulary = int(state.seen.shape[1])
        self.block_size = state.block_size(cache)
        self.num_blocks = tuple(map(int, count_free_blocks(cache)))
        # What a fresh start needs when the arrays are lost.
        self._first = cache.with_groups(tuple(map(_without_arrays, cache.groups)))
        self._placements = [_Placements.of(group) for group in cache.groups]
        self._generation: Any = None  # state and sampling

    def exchange(self, parts: list[Part], cancelled: np.ndarray[Any, Any]) -> None:
        """Cancel sequences, bool[N], and let parts of requests wait, at most K."""
        state, sampling = self._begun()
        self.cache, *self._generation = self._exchange(
            cache=self.cache,
            state=state,
            sampling=sampling,
            arrivals=Arrivals.of(self._sizes, parts),
            cancelled=np.asarray(cancelled),
        )

    def run(self, num_steps: int) -> WindowReport:
        """Start the next window; the report's arrays come when it is done."""
        state, sampling = self._begun()
        report: WindowReport
        self.cache, state, report = self._run_window(
            params=self._params,
            cache=self.cache,
            state=state,
            sampling=sampling,
            num_steps=np.int32(num_steps),
        )
        self._generation = state, sampling
        return report

    def warm_up(self, progress: Progress | None) -> int:
        """Compile all programs, by running each with nothing to do.

        Args:
          progress: told the name of each program, how many are done, and of how many.

        Returns:
          How many there are.
        """
        nobody = np.zeros((self._sizes.num_sequences,), bool)
        programs: dict[str, Callable[[], Any]] = {
            "begin": self._begun,
            "exchange": lambda: self.exchange([], nobody),
            "window": lambda: self.run(0),
        }
        for i, (name, run) in enumerate(programs.items()):
            if progress is not None:
                progress(name, i, len(programs))
            jax.block_until_ready(run())
        if progress is not None:
            progress("done", len(programs), len(programs))
        return len(programs)

    def start_again(self) -> None:
        """Make an empty generation, and a cache in the place of one that is lost.

        Raises:
          EngineError: where others had sequences in the cache: theirs are lost, too.
        """
        if np.asarray(self._first.metadata.is_open).any():
            raise EngineError(
                "a step failed, and with its cache the sequences that others had open "
                "in it; make a new engine with a new cache"
            )
        # The old pools are gone before there are new ones.
        self._generation, self.cache = None, self._first
        pairs = zip(self._first.groups, self._placements, strict=True)
        groups = [placements.make_anew(first) for first, placements in pairs]
        cache = self._first.with_groups(tuple(groups))
        has_index = cache.metadata.prefix is not None
        self.cache = clear_prefixes(cache) if has_index else cache

    def _begun(self) -> Any:
        if self._generation is None:
            self._generation = self._begin(params=self._params, cache=self.cache)
        return self._generation


class _Placements(NamedTuple):
    """Where the arrays of a cache of one group are."""

    storage: dict[str, Placement]
    metadata: Placement

    @classmethod
    def of(cls, group: Cache) -> "_Placements":
        """Look where they are."""
        storage = {name: _find_placement(each) for name, each in group.storage.items()}
        return cls(storage, _find_placement(group.metadata.is_open))

    def make_anew(self, first: Cache) -> Cache:
        """Make a cache of shapes, with the metadata of the host, there."""
        storage = {
            name: jnp.zeros(array.shape, array.dtype, device=self.storage[name])
            for name, array in first.storage.items()
        }
        metadata = place(first.metadata, self.metadata)
        return first.with_storage(storage).with_metadata(metadata)


def _without_arrays(group: Cache) -> Cache:
    """Return shapes in the place of the pools, and the metadata on the host."""
    shapes: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype)
        for name, array in group.storage.items()
    }
    return group.with_storage(shapes).with_metadata(jax.device_get(group.metadata))


def _find_placement(array: jax.Array) -> Placement:
    """Return where an array was told to be; programs are compiled for that, too."""
    return array.sharding if array.committed else None

"""The generation on the device, and the windows of it that the host has not read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.decoding.model import Model
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
      num_blocks: blocks that one sequence can find.
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
        self.num_blocks = int(cache.metadata.free_blocks.count)
        # What a fresh start needs when the arrays are lost.
        shapes: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, array in cache.storage.items()
        }
        metadata = jax.device_get(cache.metadata)
        self._first = cache.with_storage(shapes).with_metadata(metadata)
        self._placements = jax.tree.map(_find_placement, cache.storage)
        self._metadata_placement = _find_placement(cache.metadata.is_open)
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
        metadata = self._first.metadata
        if np.asarray(metadata.is_open).any():
            raise EngineError(
                "a step failed, and with its cache the sequences that others had open "
                "in it; make a new engine with a new cache"
            )
        self._generation, self.cache = None, self._first
        # The old pool is gone before there is a new one.
        storage = {
            name: jnp.zeros(array.shape, array.dtype, device=self._placements[name])
            for name, array in self._first.storage.items()
        }
        metadata = place(metadata, self._metadata_placement)
        cache = self._first.with_storage(storage).with_metadata(metadata)
        has_index = metadata.prefix is not None
        self.cache = clear_prefixes(cache) if has_index else cache

    def _begun(self) -> Any:
        if self._generation is None:
            self._generation = self._begin(params=self._params, cache=self.cache)
        return self._generation


def _find_placement(array: jax.Array) -> Placement:
    """Return where an array was told to be; programs are compiled for that, too."""
    return array.sharding if array.committed else None

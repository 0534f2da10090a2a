"""The loop on the device: the cache and the generation, from call to call."""

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.decoding.arguments.asked import How
from jkv.decoding.model.protocol import Model
from jkv.decoding.speculation.options import DraftModel
from jkv.decoding.steering.rows import as_steering
from jkv.decoding.texts.blocks import count_free_blocks
from jkv.prefixes.verbs import clear_prefixes
from jkv.serving.device import programs
from jkv.serving.device.kept_programs import BoundProgram, KeptPrograms
from jkv.serving.device.sizes import EngineSizes
from jkv.serving.device.transfers import Arrivals, Change, WindowReport
from jkv.serving.device.weights import replace_weights
from jkv.serving.device.weights_digest import digest_weights
from jkv.serving.request.limits import Limits
from jkv.serving.request.request import EngineError
from jkv.state import Cache
from jkv.status import UsageError
from jkv.steering import Steering
from jkv.storage.placement import Placement, put

Progress = Callable[[str, int, int], object]


class Loop:
    """Cache and generation, of which each call makes the next."""

    def __init__(
        self,
        model: Model,
        params: Any,
        cache: Cache,
        sizes: EngineSizes,
        how: How,
        kept: KeptPrograms | None,
    ):
        self.sizes, self.cache = sizes, cache  # the newest, which may not be done yet
        draft = how.speculate if isinstance(how.speculate, DraftModel) else None
        draft_params = None if draft is None else draft.params
        self._draft_cache = None if draft is None else draft.cache
        self._given = programs.Given(params, draft_params, as_steering(how.steering))
        static = {"model": model, "sizes": sizes}
        self._model = model
        self._begin = BoundProgram(programs.begin_empty, kept, static)
        self._exchange = BoundProgram(programs.exchange, kept, {})
        self._run_window = BoundProgram(programs.run_window, kept, static)
        self._preempt_all = BoundProgram(programs.preempt_all, kept, {})
        state, _ = self._begin.find_shapes(**self._beginning)
        self._vocabulary = int(state.seen.shape[1])
        self.block_size = state.block_size(cache)  # how many blocks a text takes
        # What one sequence can find in each group, and all sequences together.
        self.num_blocks = tuple(map(int, count_free_blocks(cache)))
        self.num_rows = int(cache.metadata.sequences.free_rows.count)
        # What a fresh start needs when the arrays are lost.
        self._first = _First.of(cache)
        self._first_draft = None if draft is None else _First.of(draft.cache)
        self._generation: Any = None  # state and sampling
        # i32[], those after an exchange that no window has followed yet.
        self.num_free_blocks: jax.Array | None = None

    @property
    def caches(self) -> list[Cache]:
        """The newest value of each cache: that of a draft model, too."""
        if self._generation is None:
            return [self.cache]
        speculation = self._generation[0].speculation
        draft = speculation and speculation.draft_cache
        return [self.cache] if draft is None else [self.cache, draft]

    @property
    def num_classes(self) -> int:
        """Classes that requests may name for what stays cached of them."""
        return self.cache.metadata.num_classes

    def pad(self, text: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a text up to its last full block and one token, i32[P], -1 behind."""
        size, most = self.block_size.tokens, self.cache.max_context_length
        padded = np.full(most, -1, np.int32)
        # A text that fills the context has one token more, which has no room.
        kept = text[: min((len(text) - 1) // size * size + 1, most)]
        padded[: len(kept)] = kept
        return padded

    def find_limits(
        self, stop_tokens: np.ndarray[Any, Any], has_detokenizer: bool
    ) -> Limits:
        """Return what a request may ask for; those without stop tokens have i32[E]."""
        steering = self._given.steering
        return Limits(
            max_prompt_tokens=self.sizes.max_prompt_tokens,
            max_new_tokens=self.sizes.steps.max_new_tokens,
            max_context_length=self.cache.max_context_length,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            vocabulary=self._vocabulary,
            stops=self.sizes.stops,
            stop_tokens=stop_tokens,
            has_detokenizer=has_detokenizer,
            num_variants=0 if steering is None else steering.num_variants,
            num_classes=self.num_classes,
        )

    def start_window(
        self,
        changes: Sequence[Change],  # in their order
        num_steps: int,  # of the window; 0 is none
    ) -> WindowReport | None:
        """Let requests end and begin, then start the next window."""
        for change in changes:
            self.exchange(change)
        return self.run(num_steps) if num_steps else None

    def exchange(self, change: Change) -> None:
        """End what was cancelled, and let at most K prompts wait."""
        state, sampling = self._begun()
        self.cache, *self._generation, self.num_free_blocks = self._exchange(
            cache=self.cache,
            state=state,
            sampling=sampling,
            change=change,
            steering=self._given.steering,
        )

    def run(self, num_steps: int) -> WindowReport:
        """Start the next window; the report's arrays come when it is done."""
        state, sampling = self._begun()
        self.num_free_blocks = None  # the report tells it
        report: WindowReport
        self.cache, state, report = self._run_window(
            given=self._given,
            cache=self.cache,
            state=state,
            sampling=sampling,
            num_steps=np.int32(num_steps),
        )
        self._generation = state, sampling
        return report

    def replace_steering(self, steering: Steering) -> None:
        """Steer by other arrays, of the same shapes and dtypes, from now on."""

        def describe(each: Steering | None) -> Any:
            leaves, structure = jax.tree.flatten(each)
            return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

        new = as_steering(steering)
        if describe(new) != describe(self._given.steering):
            raise EngineError(
                "what steers an engine may be replaced by one of the same type, with "
                "arrays of the same shapes and dtypes"
            )
        self._given = self._given._replace(steering=new)

    def replace_params(self, params: Any, draft_params: Any) -> None:
        """Compute with other weights from the next window on; None leaves a draft's."""
        old = self._given
        if draft_params is not None and old.draft_params is None:
            raise UsageError(
                "draft_params are for an engine with speculate=DraftModel(...)"
            )
        new = old._replace(params=replace_weights("params", old.params, params))
        if draft_params is not None:
            drafting = replace_weights("draft_params", old.draft_params, draft_params)
            new = new._replace(draft_params=drafting)
        self._given = new

    def digest_weights(self) -> str:
        """Return what tells the weights and their model from others, in any process."""
        exact = self.sizes.steps.exact
        return digest_weights(self._model, self._given.params, exact)

    def forget_cached(self) -> None:
        """Let nothing be found that was computed until now."""
        if self.cache.metadata.index.is_there:
            self.cache = clear_prefixes(self.cache)

    def preempt_all(self) -> None:
        """Let all sequences give their blocks back, to be computed again."""
        if self._generation is None:
            return
        state, sampling = self._generation
        self.cache, state = self._preempt_all(cache=self.cache, state=state)
        self._generation = state, sampling
        # Until the next report; an engine that is asked before that reads this one.
        self.num_free_blocks = None

    def warm_up(self, progress: Progress | None) -> int:
        """Compile all programs, by running each with nothing to do; count them."""
        nothing = Change(
            Arrivals.of(self.sizes, []), np.zeros((self.sizes.num_sequences,), bool)
        )
        programs: dict[str, Callable[[], Any]] = {
            "begin": self._begun,
            "exchange": lambda: self.exchange(nothing),
            "window": lambda: self.run(0),
        }
        for i, (name, run) in enumerate(programs.items()):
            if progress is not None:
                progress(name, i, len(programs))
            jax.block_until_ready(run())
        _return_memory()
        if progress is not None:
            progress("done", len(programs), len(programs))
        return len(programs)

    def start_again(self) -> None:
        """Make an empty generation and a new cache; fail if others had sequences."""
        first, first_draft = self._first, self._first_draft
        if first.is_shared or (first_draft is not None and first_draft.is_shared):
            raise EngineError(
                "a step failed, and with its cache the sequences that others had open "
                "in it; make a new engine with a new cache"
            )
        # The old pools are gone before there are new ones.
        self._generation, self.cache, self._draft_cache = None, first.shapes, None
        self.num_free_blocks = None
        self.cache = first.make_anew()
        if first_draft is not None:
            self._draft_cache = first_draft.make_anew()

    @property
    def _beginning(self) -> dict[str, Any]:
        return {
            "given": self._given,
            "cache": self.cache,
            "draft_cache": self._draft_cache,
        }

    def _begun(self) -> Any:
        if self._generation is None:
            _check_owned("cache", self.cache)
            _check_owned("speculate.cache", self._draft_cache)
            self._generation = self._begin(**self._beginning)
            self._draft_cache = None  # donated
        return self._generation


class _First(NamedTuple):
    """A cache as it was at first, but for what was in its pools."""

    shapes: Cache  # with shapes for pools, placed; the metadata is on the host
    metadata: Placement

    @classmethod
    def of(cls, cache: Cache) -> "_First":
        shapes = tuple(
            group.with_arrays(jax.tree.map(_shape_of, group.arrays))
            for group in cache.storage
        )
        on_host = jax.device_get(cache.metadata)
        return cls(
            cache.with_storage(shapes).with_metadata(on_host),
            _find_placement(cache.metadata.sequences.rows),
        )

    @property
    def is_shared(self) -> bool:
        """Whether it had sequences that are not the engine's."""
        return bool(np.asarray(self.shapes.metadata.is_open).any())

    def make_anew(self) -> Cache:
        def zeros(shape: Any) -> jax.Array:
            return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)

        storage = tuple(
            group.with_arrays(
                {name: zeros(each) for name, each in group.arrays.items()}
            )
            for group in self.shapes.storage
        )
        metadata = put(self.shapes.metadata, self.metadata)
        cache = self.shapes.with_storage(storage).with_metadata(metadata)
        return clear_prefixes(cache) if metadata.index.is_there else cache


def _check_owned(name: str, cache: Cache | None) -> None:
    leaves = [each for each in jax.tree.leaves(cache) if isinstance(each, jax.Array)]
    if any(leaf.is_deleted() for leaf in leaves):
        raise EngineError(
            f"the arrays of {name} are gone: it was given to another engine, or was "
            f"donated to a call; give each engine caches of its own"
        )


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=_find_placement(array)
    )


def _find_placement(array: jax.Array) -> jax.sharding.Sharding | None:
    """Return where an array was told to be; programs are compiled for that, too."""
    return array.sharding if array.committed else None


def _return_memory() -> None:
    """Give back what compiling took: glibc would keep half a gigabyte of it."""
    with contextlib.suppress(OSError, TypeError, AttributeError):  # another library
        ctypes.CDLL(None).malloc_trim(0)

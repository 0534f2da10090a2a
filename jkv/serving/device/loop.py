"""Device loop: the cache and generation state, replaced by each call."""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.decoding import DecodingOptions, DraftModel, Model
from jkv.logits_processors import LogitsProcessor
from jkv.prefixes import clear_prefixes
from jkv.serving.device import programs
from jkv.serving.device.kept_programs import KeptPrograms
from jkv.serving.device.programs import Arrivals, Change, EngineSizes, WindowReport
from jkv.serving.device.weights import replace_weights
from jkv.serving.device.weights_digest import digest_weights
from jkv.serving.request.limits import Limits
from jkv.serving.request.request import EngineError
from jkv.state import Cache
from jkv.status import UsageError
from jkv.storage.leaves import Placement, put

Progress = Callable[[str, int, int], object]


class Loop:
    """Owner of the cache and the generation state; each call replaces them."""

    def __init__(
        self,
        model: Model,
        params: Any,
        cache: Cache,
        sizes: EngineSizes,
        options: DecodingOptions,
        kept: KeptPrograms | None,
    ):
        self.sizes, self.cache = sizes, cache  # newest value, perhaps not computed yet
        draft = options.speculate if isinstance(options.speculate, DraftModel) else None
        draft_params = None if draft is None else draft.params
        self._draft_cache = None if draft is None else draft.cache
        self._given = programs.Given(
            params, draft_params, options.check().logits_processor
        )
        static = {"model": model, "sizes": sizes}
        self._model = model
        self._begin = BoundProgram(programs.begin_empty, kept, static)
        self._exchange = BoundProgram(programs.exchange, kept, {})
        self._run_window = BoundProgram(programs.run_window, kept, static)
        self._preempt_all = BoundProgram(programs.preempt_all, kept, {})
        state, _ = self._begin.find_shapes(**self._beginning)
        self._vocabulary = int(state.seen.shape[1])
        self.block_size = state.block_size(cache)
        # Blocks available to one sequence in each group of layers, and in all.
        self.num_blocks = tuple(map(int, programs.count_free_blocks(cache)))
        self.num_rows = int(cache.metadata.sequences.free_rows.count)
        # Kept to rebuild the arrays after a failed, donating call.
        self._first = _First.of(cache)
        self._first_draft = None if draft is None else _First.of(draft.cache)
        self._generation: Any = None  # state and sampling
        # i32[], after an exchange and before the next window; otherwise None.
        self.num_free_blocks: jax.Array | None = None

    @property
    def caches(self) -> list[Cache]:
        """Newest values of the cache and, if present, the draft model's."""
        if self._generation is None:
            return [self.cache]
        speculation = self._generation[0].speculation
        draft = speculation and speculation.draft_cache
        return [self.cache] if draft is None else [self.cache, draft]

    @property
    def num_classes(self) -> int:
        """Number of retention classes that requests may use."""
        return self.cache.metadata.num_classes

    def pad(self, text: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Cut a sequence one token after its last full block; pad with -1, i32[P]."""
        size, most = self.block_size.tokens, self.cache.max_context_length
        padded = np.full(most, -1, np.int32)
        # A full context has one more token, without a slot.
        kept = text[: min((len(text) - 1) // size * size + 1, most)]
        padded[: len(kept)] = kept
        return padded

    def find_limits(
        self, stop_tokens: np.ndarray[Any, Any], has_detokenizer: bool
    ) -> Limits:
        """Return the limits of requests; `stop_tokens`, i32[E], is the default."""
        logits_processor = self._given.logits_processor
        return Limits(
            max_prompt_tokens=self.sizes.max_prompt_tokens,
            max_new_tokens=self.sizes.config.max_new_tokens,
            max_context_length=self.cache.max_context_length,
            rolls=self.sizes.config.roll is not None,
            num_blocks=self.num_blocks,
            block_size=self.block_size.tokens,
            most_blocks=self.block_size.most,
            vocabulary=self._vocabulary + self.sizes.extra_ids,
            stops=self.sizes.stops,
            stop_tokens=stop_tokens,
            has_detokenizer=has_detokenizer,
            num_variants=0
            if logits_processor is None
            else logits_processor.num_variants,
            num_classes=self.num_classes,
            max_span=min(self.sizes.max_span, self.sizes.max_rows),
        )

    def start_window(
        self,
        changes: Sequence[Change],  # applied in order
        num_steps: int,  # 0 starts no window
    ) -> WindowReport | None:
        """Apply the changes, then start the next window."""
        for change in changes:
            self.exchange(change)
        return self.run(num_steps) if num_steps else None

    def exchange(self, change: Change) -> None:
        """Finish cancelled sequences and enqueue at most K prompts."""
        state, sampling = self._begun()
        self.cache, *self._generation, self.num_free_blocks = self._exchange(
            cache=self.cache,
            state=state,
            sampling=sampling,
            change=change,
            logits_processor=self._given.logits_processor,
        )

    def run(self, num_steps: int) -> WindowReport:
        """Start the next window; the report's arrays are ready when it has run."""
        state, sampling = self._begun()
        self.num_free_blocks = None  # the report has the new count
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

    def replace_logits_processor(self, logits_processor: LogitsProcessor) -> None:
        """Replace the logits processor's arrays; shapes and dtypes must match."""

        def describe(each: LogitsProcessor | None) -> Any:
            leaves, structure = jax.tree.flatten(each)
            return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

        options = DecodingOptions(logits_processor=logits_processor)
        new = options.check().logits_processor
        if describe(new) != describe(self._given.logits_processor):
            raise EngineError(
                "logits_processor must have the engine's type, shapes and dtypes, got "
                "others; create a new engine for it"
            )
        self._given = self._given._replace(logits_processor=new)

    def replace_params(self, params: Any, draft_params: Any) -> None:
        """Replace the weights; None keeps the draft model's."""
        old = self._given
        if draft_params is not None and old.draft_params is None:
            raise UsageError(
                "draft_params must be None without speculate=DraftModel(...); omit it"
            )
        new = old._replace(params=replace_weights("params", old.params, params))
        if draft_params is not None:
            drafting = replace_weights("draft_params", old.draft_params, draft_params)
            new = new._replace(draft_params=drafting)
        self._given = new

    def digest_weights(self) -> str:
        """Return a digest of weights, model and `exact`, the same in every process."""
        exact = self.sizes.config.exact
        return digest_weights(self._model, self._given.params, exact)

    def forget_cached(self) -> None:
        """Clear the prefix index."""
        if self.cache.metadata.index.is_there:
            self.cache = clear_prefixes(self.cache)

    def preempt_all(self) -> None:
        """Preempt all running sequences, to be recomputed."""
        if self._generation is None:
            return
        state, sampling = self._generation
        self.cache, state = self._preempt_all(cache=self.cache, state=state)
        self._generation = state, sampling
        # Unknown until the next report; a reader of statistics uses the last one.
        self.num_free_blocks = None

    def warm_up(self, progress: Progress | None) -> int:
        """Compile each program by running it without work; return their number."""
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
        """Rebuild an empty generation and cache; raise if it had foreign sequences."""
        first, first_draft = self._first, self._first_draft
        if first.is_shared or (first_draft is not None and first_draft.is_shared):
            raise EngineError(
                "a step failed, and the donated cache had open sequences of its "
                "previous owner; create a new engine with a new cache"
            )
        # Free the old pools before allocating new ones.
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


class BoundProgram:
    """A program with its static arguments bound: jitted, or loaded from a folder."""

    def __init__(self, program: Any, kept: KeptPrograms | None, static: dict[str, Any]):
        self._program, self._kept, self._static = program, kept, static
        self._executable: Any = None

    def __call__(self, **dynamic: Any) -> Any:
        """Run on the dynamic arguments, whose shapes must not change."""
        if self._kept is None:
            return self._program(**self._static, **dynamic)
        return self._find(self._kept, dynamic)(**dynamic)

    def find_shapes(self, **dynamic: Any) -> Any:
        if self._kept is None:
            program = functools.partial(self._program, **self._static)
            return jax.eval_shape(program, **dynamic)
        return self._find(self._kept, dynamic).out_info

    def _find(self, kept: KeptPrograms, dynamic: dict[str, Any]) -> Any:
        if self._executable is None:
            self._executable = kept.find(self._program, self._static, dynamic)
        return self._executable


class _First(NamedTuple):
    """The initial state of a cache, without the contents of its pools."""

    shapes: Cache  # pools as shapes with shardings; metadata on the host
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
        """True if the cache had open sequences before the engine."""
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
            f"{name} must own its arrays, got deleted ones, donated by another engine "
            f"or call; create a cache for each engine"
        )


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=_find_placement(array)
    )


def _find_placement(array: jax.Array) -> jax.sharding.Sharding | None:
    """Return an array's committed sharding, or None; programs are compiled for it."""
    return array.sharding if array.committed else None


def _return_memory() -> None:
    """Trim the heap: glibc keeps half a gigabyte of free memory after compilation."""
    with contextlib.suppress(OSError, TypeError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)

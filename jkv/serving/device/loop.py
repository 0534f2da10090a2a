"""Device loop: the cache and generation state, replaced by each call."""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.decoding import DecodingOptions, Model
from jkv.logits_processors import LogitsProcessor
from jkv.prefixes import clear_prefixes, match
from jkv.serving.device import programs
from jkv.serving.device.kept_programs import KeptPrograms
from jkv.serving.device.programs import Arrivals, Change, EngineSizes, WindowReport
from jkv.serving.device.weights import replace_weights
from jkv.serving.device.weights_digest import digest_weights
from jkv.serving.request.limits import Limits
from jkv.serving.request.request import EngineError
from jkv.state import Cache
from jkv.status import Status, UsageError
from jkv.storage.leaves import Placement, put, put_numpy
from jkv.storage.swapped import Swapped, copy_out
from jkv.verbs.allocation import free
from jkv.verbs.branching import truncate
from jkv.verbs.lookups import next_positions
from jkv.verbs.swapping import swap_in

Progress = Callable[[str, int, int], object]


def _place(given: Any, cache: Cache) -> Any:
    """Copy numpy arrays to the cache's device, instead of in each call.

    A cache on several devices leaves them to the program.
    """
    rows = cache.metadata.sequences.rows
    device, *others = rows.sharding.device_set
    return given if others else put_numpy(given, device if rows.committed else None)


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
        given = programs.Given(
            params,
            jax.tree.leaves(options.speculate),
            options.check().logits_processor,
        )
        self._given: programs.Given = _place(given, cache)
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
        self._generation: Any = None  # state and sampling
        # i32[], after an exchange and before the next window; otherwise None.
        self.num_free_blocks: jax.Array | None = None

    @property
    def num_classes(self) -> int:
        """Number of retention classes that requests may use."""
        return self.cache.metadata.num_classes

    def pad(self, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Cut a sequence one token after its last full block; pad with -1, i32[P]."""
        size, most = self.block_size.tokens, self.cache.max_context_length
        padded = np.full(most, -1, np.int32)
        # A full context has one more token, without a slot.
        kept = tokens[: min((len(tokens) - 1) // size * size + 1, most)]
        padded[: len(kept)] = kept
        return padded

    def match(self, tokens: np.ndarray[Any, Any], salt: int) -> int:
        """Return the number of a sequence's tokens in the cache."""
        return int(match(self.cache, self.pad(tokens)[None], salt)[0])

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
        inputs = self._find_exchange_inputs(change)
        self.cache, *self._generation, self.num_free_blocks = self._exchange(**inputs)

    def run(self, num_steps: int) -> WindowReport:
        """Start the next window; the report's arrays are ready when it has run."""
        inputs = self._find_window_inputs(num_steps)
        self.num_free_blocks = None  # the report has the new count
        report: WindowReport
        self.cache, state, report = self._run_window(**inputs)
        self._generation = state, inputs["sampling"]
        return report

    def _find_exchange_inputs(self, change: Change) -> dict[str, Any]:
        state, sampling = self._begun()
        return {
            "cache": self.cache,
            "state": state,
            "sampling": sampling,
            "change": change,
            "logits_processor": self._given.logits_processor,
        }

    def _find_window_inputs(self, num_steps: int) -> dict[str, Any]:
        state, sampling = self._begun()
        return {
            "given": self._given,
            "cache": self.cache,
            "state": state,
            "sampling": sampling,
            "num_steps": np.int32(num_steps),
        }

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
        given = self._given._replace(logits_processor=new)
        self._given = _place(given, self.cache)

    def replace_params(self, params: Any, draft_params: Any) -> None:
        """Replace the weights; None keeps the drafter's."""
        old, kept = self._given, self.draft_params
        if draft_params is not None and kept is None:
            raise UsageError(
                "draft_params must be None without a drafter that has params, such as "
                "speculate=DraftModel(...); omit it"
            )
        new = old._replace(params=replace_weights("params", old.params, params))
        if draft_params is not None:
            drafting = replace_weights("draft_params", kept, draft_params)
            drafter: Any = dataclasses.replace(self._drafter, params=drafting)
            new = new._replace(drafter=jax.tree.leaves(drafter))
        self._given = new

    @property
    def draft_params(self) -> Any:
        """The weights of the drafter, None without any."""
        return getattr(self._drafter, "params", None)

    @property
    def _drafter(self) -> Any:
        """The drafter with its arrays, or None."""
        sizes = self.sizes.drafter
        return None if sizes is None else sizes.with_arrays(self._given.drafter)

    def digest_weights(self) -> str:
        """Return a digest of weights, model and `exact`, the same in every process.

        It includes a drafter whose layers are in the cache.
        """
        exact, drafter = self.sizes.config.exact, self._drafter
        model: Any = self._model
        params = self._given.params
        if drafter is not None and drafter.groups:
            model, params = (model, type(drafter).__name__), (params, drafter)
        return digest_weights(model, params, exact)

    # Rolled sequences, which are swapped out to be parked.

    @property
    def keeps_rows(self) -> bool:
        """True if finished sequences may keep their rows until they are taken."""
        return self.sizes.rolls

    def take_out(self, sequence: int, num_tokens: int) -> Swapped | None:
        """Copy a rolled sequence to the host, with at most `num_tokens` computed.

        It has finished and kept its row, which is freed, or is about to be cancelled.
        Return None if it has no row, has not rolled, or cannot be shortened.
        """
        state, sampling = self._begun()
        kept, seq_ids = jax.device_get((state.kept.rows, state.seq_ids))
        is_kept = kept[sequence] >= 0
        row = int(kept[sequence] if is_kept else seq_ids[sequence])
        if row < 0:
            return None
        length = int(self.cache.metadata.context_lengths[row])
        num_computed = int(next_positions(self.cache)[row])
        can_copy = num_computed > length  # it has rolled
        if can_copy and (excess := num_computed - num_tokens) > 0:
            self.cache, status = truncate(self.cache, row, length - excess)
            can_copy = int(status[0]) == Status.OK
        swapped = copy_out(self.cache, row) if can_copy else None
        if is_kept:
            self.cache, _ = free(self.cache, row)
            left = state.kept.leave(jnp.full((1,), sequence, jnp.int32))
            self._generation = dataclasses.replace(state, kept=left), sampling
        return swapped

    def put_in(self, swapped: Swapped) -> int:
        """Swap a sequence in and return its row; -1 if there is no room."""
        state, _ = self._begun()
        if int(state.kept.count_spare(self.cache, state)) < 1:
            return -1
        self.cache, entered = swap_in(self.cache, swapped, donate=True)
        return int(entered.seq_ids[0])

    def free_kept_rows(self) -> None:
        """Free the rows of sequences without a place; they are recomputed."""
        if self.keeps_rows and self._generation is not None:
            state, sampling = self._generation
            self.cache, state = state.kept.free_all(self.cache, state)
            self._generation = state, sampling

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
        """Compile each program and run it without work; return their number."""
        none = np.zeros((self.sizes.num_sequences,), bool)
        parked = none if self.keeps_rows else None
        nothing = Change(Arrivals.of(self.sizes, []), none, parked)
        programs: dict[str, Callable[[], Any]] = {
            "begin": self._begun,
            "exchange": lambda: self.exchange(nothing),
            "window": lambda: self.run(0),
        }
        for i, (name, run) in enumerate(programs.items()):
            if progress is not None:
                progress(name, i, len(programs))
            jax.block_until_ready(run())
            if i == 0:  # the others need the state that `begin` makes
                self._compile_others(nothing)
        _return_memory()
        if progress is not None:
            progress("done", len(programs), len(programs))
        return len(programs)

    def _compile_others(self, change: Change) -> None:
        """Compile the programs after `begin` side by side.

        They are traced in this thread, which has the caller's settings. Processes
        compile one after the other, in the same order.
        """
        if jax.process_count() > 1:
            return
        lowered = [
            self._run_window.lower(**self._find_window_inputs(0)),
            self._exchange.lower(**self._find_exchange_inputs(change)),
        ]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda each: each and each.compile(), lowered))

    def start_again(self) -> None:
        """Rebuild an empty generation and cache; raise if it had foreign sequences."""
        first = self._first
        if first.is_shared:
            raise EngineError(
                "a step failed, and the donated cache had open sequences of its "
                "previous owner; create a new engine with a new cache"
            )
        # Free the old pools before allocating new ones.
        self._generation, self.cache = None, first.shapes
        self.num_free_blocks = None
        self.cache = first.make_anew()

    @property
    def _beginning(self) -> dict[str, Any]:
        return {"given": self._given, "cache": self.cache}

    def _begun(self) -> Any:
        if self._generation is None:
            _check_owned("cache", self.cache)
            self._generation = self._begin(**self._beginning)
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

    def lower(self, **dynamic: Any) -> jax.stages.Lowered | None:
        """Lower the program, so that a call finds it compiled; None if it is kept."""
        if self._kept is not None:
            return None
        lowered: jax.stages.Lowered = self._program.lower(**self._static, **dynamic)
        return lowered

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

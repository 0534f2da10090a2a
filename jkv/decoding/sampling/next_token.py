"""The next token of each sequence: logits processors, the draw, and finish reasons.

A loop stores a row of the processor's state for each sequence in its result. It picks
the rows of a step, processes their logits and advances with the chosen tokens. Results
of a `LogitsProcessor` are checked here, where alone it is called.

Symbols: N sequences, W places, V vocabulary size, K rows or lanes; Q prompts of P
tokens at most, E stop tokens, F stop sequences of C tokens at most. Stop conditions
shared by all prompts have one row instead of Q.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.arguments import expect
from jkv.decoding.sampling.draws import Choice, Sampling, by_row
from jkv.decoding.sequences.blocks import Blocks, BlockSize, of_tokens, reach
from jkv.decoding.sequences.prompts import ANY, Prompts, Stops, find_malformed
from jkv.decoding.sequences.results import FinishReason, Generation
from jkv.logits_processors import LogitsProcessor
from jkv.logits_processors.protocol import check_logits_processor
from jkv.operations import gather, scatter, scatter_add
from jkv.status import UsageError

# Before the first new token; equal to no token and to no padding.
_NO_TOKEN = -2


class ProcessorRows(NamedTuple):
    """K rows of sequences and their logits processor."""

    processor: LogitsProcessor
    state: Any  # a pytree of arrays [K, ...]
    applies: jax.Array  # bool[K], False for rows without a processor

    def pick(self, rows: jax.Array) -> "ProcessorRows":
        """Return the given rows, i32[...], flattened."""
        rows = rows.reshape(-1)
        state, applies = jax.tree.map(
            lambda array: gather(array, rows), (self.state, self.applies)
        )
        return self._replace(state=state, applies=applies)

    def process(self, logits: jax.Array) -> jax.Array:
        """Return the processed logits, f32[K, V]."""
        processed = self.processor.process(self.state, logits)
        _check_array(self.processor, "process", processed, logits, jnp.float32)
        return jnp.where(self.applies[:, None], processed, logits)

    def advance(self, tokens: jax.Array) -> "ProcessorRows":
        """Return the rows after one more token each, i32[K], -1 for none."""
        tokens = jnp.where(self.applies, tokens, -1)
        state = self.processor.advance(self.state, tokens)
        _check_same(self.processor, self.state, state)
        state = jax.tree.map(lambda new, old: new.astype(old.dtype), state, self.state)
        return self._replace(state=state)

    def advance_through(self, tokens: jax.Array) -> "ProcessorRows":
        """Return the rows before each of further tokens, i32[K, C], and after the last.

        Tokens are -1 past the end of a sequence. The rows of a sequence are contiguous.
        """
        rows = [self]
        for column in range(tokens.shape[1]):
            rows.append(rows[-1].advance(tokens[:, column]))

        def stack(*arrays: jax.Array) -> jax.Array:
            return jnp.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])

        state = jax.tree.map(stack, *(each.state for each in rows))
        return self._replace(state=state, applies=jnp.repeat(self.applies, len(rows)))

    def has_ended(self) -> jax.Array | None:
        """Return True for sequences that end with their newest token, bool[K]."""
        ended = self.processor.ended(self.state)
        if ended is None:
            return None
        _check_array(self.processor, "ended", ended, self.applies, jnp.bool_)
        return ended & self.applies

    def find_forced(self) -> jax.Array | None:
        """Return the only allowed next tokens, i32[K], -1 where several are allowed."""
        forced = self.processor.forced(self.state)
        if forced is None:
            return None
        _check_array(self.processor, "forced", forced, self.applies, jnp.int32)
        return jnp.where(self.applies, forced, -1)


def rows_of(
    processor: LogitsProcessor | None,  # the logits processor
    prompts: Prompts,
    result: Generation,  # of N sequences, with their states
    sequences: jax.Array,  # i32[K]; N or more gives an arbitrary row
) -> ProcessorRows | None:
    """Return the rows of sequences, or None without a logits processor."""
    if processor is None:
        return None
    num_samples = result.lengths.shape[0] // prompts.lengths.shape[0]
    whole = all_rows(processor, prompts, result.processor_state, num_samples)
    return whole.pick(sequences)


def all_rows(
    processor: LogitsProcessor, prompts: Prompts, state: Any, num_each: int
) -> ProcessorRows:
    """Return the rows of all sequences, `num_each` of each prompt in turn."""
    assert prompts.variants is not None, "prompts with a logits processor have variants"
    applies = jnp.repeat(prompts.variants >= 0, num_each)
    return ProcessorRows(processor, state, applies)


def mark_refused(
    logits: jax.Array,  # f32[K, V], processed
    tokens: jax.Array,  # i32[K], chosen from them
    logprobs: jax.Array,  # f32[K], of the tokens
) -> jax.Array:
    """Set log-probabilities, f32[K], to -inf for rows with all tokens masked.

    A chosen token never has -inf, which distinguishes these rows from NaN logits. Whole
    rows are read only if the chosen token itself is masked, which is rare.
    """
    taken = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    may_be = taken == -jnp.inf
    is_refused = lax.cond(jnp.any(may_be), is_nothing_left, lambda _: may_be, logits)
    return jnp.where(is_refused, jnp.float32(-jnp.inf), logprobs)


def is_nothing_left(logits: jax.Array) -> jax.Array:
    """Return True for rows of logits, f32[K, V], with all tokens masked, bool[K].

    NaN compares unequal, so a row with NaN is not among them.
    """
    return jnp.all(logits == -jnp.inf, axis=-1)


def as_logits_processor(processor: LogitsProcessor | None) -> LogitsProcessor | None:
    """Return the logits processor with its leaves as arrays; None for None."""
    if processor is None:
        return None
    check_logits_processor(processor, "logits_processor")
    for leaf in jax.tree.leaves(processor):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
            raise UsageError(
                f"{_name(processor)} must be a pytree of arrays, got a leaf of "
                f"type {type(leaf).__name__}; decorate its dataclass with "
                f"@jax.tree_util.register_dataclass and mark other fields as static"
            )
    return jax.tree.map(jnp.asarray, processor)


def check_processor_presence(state: Any, processor: LogitsProcessor | None) -> None:
    """Check that a logits processor is given if and only if it was at the start."""
    if (state is None) != (processor is None):
        was, now = ("without", "with") if state is None else ("with", "without")
        raise UsageError(
            f"this generation was begun {was} logits_processor and continues {now} "
            f"it; pass the same to `begin` or `prefill`, `decode` and `add_prompts`"
        )


def with_variants(prompts: Prompts, processor: LogitsProcessor | None) -> Prompts:
    """Return prompts with a variant each; refuse variants known to be invalid."""
    given = prompts.variants
    if processor is None:
        is_traced = isinstance(given, jax.core.Tracer)
        # The first variant and -1 need no logits processor.
        if given is not None and (
            is_traced or not np.isin(np.asarray(given), (0, -1)).all()
        ):
            raise UsageError(
                "variants need a logits processor; pass logits_processor= or omit them"
            )
        return dataclasses.replace(prompts, variants=None)
    if given is None:
        given = jnp.zeros_like(prompts.lengths)
    if not isinstance(given, jax.core.Tracer):
        wrong = np.asarray(given)[find_unknown(np.asarray(given), processor)]
        if wrong.size:
            raise UsageError(
                f"variants of {_name(processor)} must be -1 (none) or below "
                f"{processor.num_variants}, got {int(wrong[0])}"
            )
    return dataclasses.replace(prompts, variants=jnp.asarray(given))


def find_unknown(variants: Any, processor: LogitsProcessor) -> Any:
    """Return True for invalid variants, i32[Q], bool[Q]."""
    return (variants < -1) | (variants >= processor.num_variants)


def begin_rows(
    processor: LogitsProcessor | None,  # the logits processor
    prompts: Prompts,
    num_samples: int,  # sequences of each prompt
) -> Any:
    """Return the initial state of sequences, [N, ...]; None without a processor."""
    if processor is None:
        return None
    variants = prompts.variants
    assert variants is not None, "prompts with a logits processor have variants"
    num_sequences = variants.shape[0] * num_samples
    known = jnp.where(find_unknown(variants, processor), -1, variants)
    state = processor.begin(
        jnp.repeat(known, num_samples), jnp.repeat(prompts.tokens, num_samples, axis=0)
    )
    for leaf in jax.tree.leaves(state):
        name = f"each leaf of {_name(processor)}.begin"
        expect(name, leaf, "N ...", {"N": num_sequences}, why="a row for each sequence")
    return state


def resume_rows(processor: LogitsProcessor | None, begun: Any, given: Any) -> Any:
    """Return the state of an earlier call after a check of its structure."""
    if processor is None:
        raise UsageError(
            "processor_state needs a logits processor; pass logits_processor="
        )
    _check_same(processor, begun, given, "the processor_state of the call before")
    return given


def _check_same(
    processor: LogitsProcessor, old: Any, new: Any, what: str = "what `advance` returns"
) -> None:
    """Check that a state has the structure, shapes and dtypes of the one before."""

    def describe(state: Any) -> list[str]:
        leaves, structure = jax.tree.flatten(state)
        shapes = [f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in leaves]
        return [str(structure), *shapes]

    was, now = describe(old), describe(new)
    if was != now:
        raise UsageError(
            f"{_name(processor)}: {what} must be as `begin` makes it, "
            f"{', '.join(was[1:])}; got {', '.join(now[1:]) or now[0]}"
        )


def _check_array(
    processor: LogitsProcessor,
    method: str,
    array: Any,
    like: jax.Array,  # [K] or [K, V]
    dtype: Any,
) -> None:
    """Check the shape and dtype of a method's result."""
    axes = "K V" if like.ndim == 2 else "K"
    sizes = dict(zip(axes.split(), like.shape, strict=True))
    name = f"the result of {_name(processor)}.{method}"
    expect(name, array, axes, sizes, dtype, why="a row for each sequence")


def _name(processor: object) -> str:
    return type(processor).__name__


class Bounds(NamedTuple):
    """The longest sequences that fit this cache."""

    max_context_length: jax.Array | int  # i32[N] if it differs
    block_size: BlockSize
    num_blocks: Blocks  # i32[], blocks for a sequence alone
    shortening: Any = None  # a static `Shortening`, or None

    def of(self, sequences: jax.Array) -> "Bounds":
        """Return the bounds of sequences, i32[K] of N."""
        if not jnp.ndim(self.max_context_length):
            return self
        most = gather(jnp.asarray(self.max_context_length), sequences)
        return self._replace(max_context_length=most)

    def exceeded(
        self, lengths: jax.Array, prompt_lengths: jax.Array
    ) -> list[tuple[FinishReason, jax.Array]]:
        """Return the bounds exceeded by sequences of these lengths, i32[K]."""
        if self.shortening is not None:
            lengths = self.shortening.slots(prompt_lengths, lengths)
        has_blocks = reach(self.num_blocks, of_tokens(lengths, self.block_size))
        return [
            (FinishReason.CONTEXT_FULL, lengths > self.max_context_length),
            (FinishReason.OUT_OF_BLOCKS, ~has_blocks),
        ]


class Progress(NamedTuple):
    """Prompts, results and stop conditions of N sequences."""

    prompts: Prompts
    stops: Stops
    bounds: Bounds
    result: Generation

    @property
    def is_running(self) -> jax.Array:
        """True for sequences that have not finished, bool[N]."""
        return self.result.reasons == FinishReason.RUNNING


def find_first(
    shape: Sequence[int], causes: list[tuple[FinishReason, jax.Array]]
) -> jax.Array:
    """Return the first reason that applies, i32[K], or RUNNING."""
    reasons = jnp.full(shape, FinishReason.RUNNING, jnp.int32)
    for reason, applies in reversed(causes):
        reasons = jnp.where(applies, jnp.int32(reason), reasons)
    return reasons


def judge_prompts(
    prompts: Prompts,
    bounds: Bounds,
    vocabulary: int,
    logits_processor: LogitsProcessor | None,
    num_rows: int,  # of the largest step
) -> jax.Array:
    """Return why prompts cannot start, i32[Q], RUNNING for valid ones.

    Outside jit, for concrete tokens, a malformed prompt raises UsageError.
    """
    processor: list[tuple[FinishReason, jax.Array]] = []
    if prompts.variants is not None and logits_processor is not None:
        unknown = find_unknown(prompts.variants, logits_processor)
        processor = [(FinishReason.UNKNOWN_VARIANT, unknown)]
    spans: list[tuple[FinishReason, jax.Array]] = []
    if prompts.spans is not None:
        is_long = prompts.spans.are_too_long(num_rows)
        spans = [(FinishReason.SPAN_TOO_LONG, is_long)]
    return find_first(
        prompts.lengths.shape,
        [
            (FinishReason.MALFORMED_PROMPT, find_malformed(prompts, vocabulary)),
            (FinishReason.EMPTY_PROMPT, prompts.lengths == 0),
            *processor,
            *spans,
            (FinishReason.LENGTH, prompts.limits <= 0),
            *bounds.exceeded(prompts.lengths, prompts.lengths),
        ],
    )


def judge_sequences(
    progress: Progress,
    tokens: jax.Array,  # i32[N, G], completions
    sequences: jax.Array,  # i32[K]
    lengths: jax.Array,  # i32[K], new tokens including the one to test
    # bool[K], the logits processor has ended
    has_ended: jax.Array | None,
) -> jax.Array:
    """Return why sequences finish after a token, i32[K], RUNNING if they continue."""
    prompts = progress.prompts
    num_samples = tokens.shape[0] // prompts.lengths.shape[0]
    prompt = jax.lax.div(sequences, jnp.int32(num_samples))
    newest = gather(tokens, (sequences, jnp.maximum(lengths - 1, 0)))
    stops = progress.stops.of_prompts(prompt)
    prompt_lengths = gather(prompts.lengths, prompt)
    is_stop = jnp.any(newest[:, None] == stops.tokens, axis=1)
    if stops.sequences is not None:
        is_stop |= _ends_with_any(tokens, sequences, lengths, stops.sequences)
    if has_ended is not None:
        is_stop |= has_ended
    return find_first(
        lengths.shape,
        [
            (FinishReason.STOP, is_stop),
            (FinishReason.LENGTH, lengths >= gather(prompts.limits, prompt)),
            *progress.bounds.of(sequences).exceeded(
                prompt_lengths + lengths, prompt_lengths
            ),
        ],
    )


def _ends_with_any(
    tokens: jax.Array, sequences: jax.Array, lengths: jax.Array, stops: jax.Array
) -> jax.Array:
    """Return True for completions, i32[K], that end with a stop sequence, bool[K]."""
    width = stops.shape[2]
    offset = jnp.arange(width, dtype=jnp.int32)[None]
    column = lengths[:, None] - width + offset
    last = gather(tokens, (sequences[:, None], jnp.maximum(column, 0)))
    last = jnp.where(column < 0, _NO_TOKEN, last)
    agrees = (stops == ANY) | (stops == last[:, None])
    is_stop = jnp.all(agrees, axis=2) & jnp.any(stops != ANY, axis=2)
    return jnp.any(is_stop, axis=1)


def choose_next(
    progress: Progress,  # of N sequences
    logits: jax.Array,  # f32[K, V]
    sequences: jax.Array,  # i32[K], N for none
    # bool[K, V], tokens of each sequence; None without a repetition penalty
    seen: jax.Array | None,
    choice: Choice,  # of N sequences
) -> tuple[Generation, jax.Array, jax.Array]:
    """Choose a token for each sequence, i32[K], and update its finish reason.

    Returns:
      The results; the tokens, i32[K]; and the processed logits, f32[K, V]. A loop that
      carries a buffer for logits keeps the latter, so that processors write in place.
    """
    result, num_sequences = progress.result, progress.result.lengths.shape[0]
    known = jnp.minimum(sequences, num_sequences - 1)
    chosen = sampling_of(choice.sampling, num_sequences, known)
    positions = gather(result.lengths, known)
    processor = rows_of(choice.logits_processor, progress.prompts, result, known)
    if processor is not None:
        logits = processor.process(logits)
    tokens, logprobs = choice.sample(logits, chosen, positions, seen)
    if processor is not None:
        logprobs = mark_refused(logits, tokens, logprobs)
        processor = processor.advance(tokens)
    new = _New(sequences, positions, tokens, logprobs, processor)
    written = new.put(result.tokens)
    reasons = _judge(progress, new, written)
    result = _put(result, new, written, reasons, new.find_served(num_sequences))
    return result, tokens, logits


def take_several(
    progress: Progress,  # of N sequences
    sequences: jax.Array,  # i32[W], N for none
    tokens: jax.Array,  # i32[W, C]
    logprobs: jax.Array,  # f32[W, C], as `_New.logprobs`
    # bool[W, C], the next token may follow; not for the last
    follows: jax.Array,
    before: ProcessorRows | None,  # W * C rows of the logits processor
) -> tuple[Generation, jax.Array]:
    """Append several tokens to sequences; return those appended, bool[W, C]."""
    result, num_sequences = progress.result, progress.result.lengths.shape[0]
    known = jnp.minimum(sequences, num_sequences - 1)
    after = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = (gather(result.lengths, known)[:, None] + after).reshape(-1)
    each = jnp.broadcast_to(sequences[:, None], tokens.shape).reshape(-1)
    flat = tokens.reshape(-1)
    processor = None if before is None else before.advance(flat)
    new = _New(each, positions, flat, logprobs.reshape(-1), processor)
    reasons = _judge(progress, new, new.put(result.tokens))
    # A token is appended if the sequence continues after all tokens before.
    goes_on = follows & (reasons == FinishReason.RUNNING).reshape(tokens.shape)
    last = jnp.argmin(goes_on, axis=1).astype(jnp.int32)
    is_taken = (sequences < num_sequences)[:, None] & (after <= last[:, None])
    taken = jnp.where(is_taken.reshape(-1), each, num_sequences)
    new = new._replace(sequences=taken)
    is_last = (after == last[:, None]).reshape(-1)
    newest = jnp.where(is_last, new.find_served(num_sequences), num_sequences)
    return _put(result, new, new.put(result.tokens), reasons, newest), is_taken


class _New(NamedTuple):
    """New tokens."""

    sequences: jax.Array  # i32[K], N for none
    positions: jax.Array  # i32[K], index in the completion
    tokens: jax.Array  # i32[K]
    # f32[K], NaN for NaN logits, -inf if all tokens are masked
    logprobs: jax.Array
    processor: ProcessorRows | None  # K rows, after the tokens

    def put(self, tokens: jax.Array) -> jax.Array:
        """Return completions, i32[N, G], with the new tokens."""
        sequences = self.find_served(tokens.shape[0])
        return scatter(tokens, (sequences, self.positions), self.tokens)

    def find_served(self, num_sequences: int) -> jax.Array:
        """Return the sequences that get a token, i32[K], or N."""
        has_none = jnp.isnan(self.logprobs)
        if self.processor is not None:
            has_none |= self.is_refused
        return jnp.where(has_none, num_sequences, self.sequences)

    @property
    def is_refused(self) -> jax.Array:
        """True where the logits processor masked all tokens, bool[K]."""
        return self.logprobs == -jnp.inf


def _judge(progress: Progress, new: _New, written: jax.Array) -> jax.Array:
    """Return why sequences finish after their new tokens, i32[K]."""
    known = jnp.minimum(new.sequences, progress.result.lengths.shape[0] - 1)
    ended = new.processor and new.processor.has_ended()
    reasons = judge_sequences(progress, written, known, new.positions + 1, ended)
    if new.processor is not None:
        nothing = jnp.int32(FinishReason.NOTHING_ALLOWED)
        reasons = jnp.where(new.is_refused, nothing, reasons)
    nan = jnp.int32(FinishReason.NAN_LOGITS)
    return jnp.where(jnp.isnan(new.logprobs), nan, reasons)


def _put(
    result: Generation,  # of N sequences
    new: _New,  # K tokens
    written: jax.Array,  # i32[N, G], with the new tokens
    reasons: jax.Array,  # i32[K], finish reason after each token
    # i32[K], the sequence if this is its newest token, else N
    newest: jax.Array,
) -> Generation:
    """Add new tokens to the results and set finish reasons."""
    num_sequences = result.lengths.shape[0]
    served = new.find_served(num_sequences)
    ended = jnp.where(reasons == FinishReason.RUNNING, num_sequences, new.sequences)
    return result._replace(
        tokens=written,
        lengths=scatter_add(result.lengths, served, 1),
        reasons=scatter(result.reasons, ended, reasons),
        logprobs=scatter(result.logprobs, (served, new.positions), new.logprobs),
        processor_state=jax.tree.map(
            lambda rows, new: scatter(rows, newest, new),
            result.processor_state,
            new.processor and new.processor.state,
        ),
    )


def sampling_of(
    sampling: Sampling, num_sequences: int, sequences: jax.Array
) -> Sampling:
    """Return the sampling options of sequences, i32[K] of N; scalars stay scalars."""
    rows = by_row(sampling, num_sequences)._asdict()
    is_one = {name: jnp.ndim(getattr(sampling, name)) == 0 for name in rows}
    # A scalar seed is spread over the sequences.
    is_one["seeds"] = False
    picked = {
        name: getattr(sampling, name) if is_one[name] else gather(values, sequences)
        for name, values in rows.items()
    }
    return Sampling(**picked)

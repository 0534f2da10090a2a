"""Rows of a logits processor (`LogitsProcessor`), with its results checked.

A loop stores a row of the processor's state for each sequence in its result. It picks
the rows of a step, processes their logits and advances with the chosen tokens.

Symbols: N sequences, Q prompts, K rows of a call, C tokens of one sequence, P most
prompt tokens, V vocabulary size.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.arguments import expect
from jkv.decoding.texts.prompts import Prompts
from jkv.decoding.texts.results import Generation
from jkv.indexing import gather
from jkv.logits_processors import LogitsProcessor
from jkv.logits_processors.protocol import check_logits_processor
from jkv.status import UsageError


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
        _check_array(self.processor, "process", processed, logits.shape, jnp.float32)
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
        _check_array(self.processor, "ended", ended, self.applies.shape, jnp.bool_)
        return ended & self.applies

    def find_forced(self) -> jax.Array | None:
        """Return the only allowed next tokens, i32[K], -1 where several are allowed."""
        forced = self.processor.forced(self.state)
        if forced is None:
            return None
        _check_array(self.processor, "forced", forced, self.applies.shape, jnp.int32)
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
    shape: tuple[int, ...],
    dtype: Any,
) -> None:
    """Check the shape and dtype of a method's result."""
    expected = f"{jnp.dtype(dtype)}{list(shape)}"
    got = f"{jnp.result_type(array)}{list(jnp.shape(array))}"
    if got != expected:
        raise UsageError(
            f"{_name(processor)}.{method} must return {expected}, got {got}"
        )


def _name(processor: object) -> str:
    return type(processor).__name__

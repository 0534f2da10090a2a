"""Rows of a logits processor (`Steering`), with its results checked.

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
from jkv.status import UsageError
from jkv.steering import Steering
from jkv.steering.protocol import check_steering


class SteeredRows(NamedTuple):
    """K rows of sequences and their logits processor."""

    steering: Steering
    state: Any  # a pytree of arrays [K, ...]
    is_steered: jax.Array  # bool[K], False for rows without a processor

    def pick(self, rows: jax.Array) -> "SteeredRows":
        """Return the given rows, i32[...], flattened."""
        rows = rows.reshape(-1)
        state, is_steered = jax.tree.map(
            lambda array: gather(array, rows), (self.state, self.is_steered)
        )
        return self._replace(state=state, is_steered=is_steered)

    def steer(self, logits: jax.Array) -> jax.Array:
        """Return the processed logits, f32[K, V]."""
        steered = self.steering.steer(self.state, logits)
        _check_array(self.steering, "steer", steered, logits.shape, jnp.float32)
        return jnp.where(self.is_steered[:, None], steered, logits)

    def advance(self, tokens: jax.Array) -> "SteeredRows":
        """Return the rows after one more token each, i32[K], -1 for none."""
        tokens = jnp.where(self.is_steered, tokens, -1)
        state = self.steering.advance(self.state, tokens)
        _check_same(self.steering, self.state, state)
        state = jax.tree.map(lambda new, old: new.astype(old.dtype), state, self.state)
        return self._replace(state=state)

    def advance_through(self, tokens: jax.Array) -> "SteeredRows":
        """Return the rows before each of further tokens, i32[K, C], and after the last.

        Tokens are -1 past the end of a sequence. The rows of a sequence are contiguous.
        """
        rows = [self]
        for column in range(tokens.shape[1]):
            rows.append(rows[-1].advance(tokens[:, column]))

        def stack(*arrays: jax.Array) -> jax.Array:
            return jnp.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])

        state = jax.tree.map(stack, *(each.state for each in rows))
        return self._replace(
            state=state, is_steered=jnp.repeat(self.is_steered, len(rows))
        )

    def has_ended(self) -> jax.Array | None:
        """Return True for sequences that end with their newest token, bool[K]."""
        ended = self.steering.ended(self.state)
        if ended is None:
            return None
        _check_array(self.steering, "ended", ended, self.is_steered.shape, jnp.bool_)
        return ended & self.is_steered

    def find_forced(self) -> jax.Array | None:
        """Return the only allowed next tokens, i32[K], -1 where several are allowed."""
        forced = self.steering.forced(self.state)
        if forced is None:
            return None
        _check_array(self.steering, "forced", forced, self.is_steered.shape, jnp.int32)
        return jnp.where(self.is_steered, forced, -1)


def rows_of(
    steering: Steering | None,  # the logits processor
    prompts: Prompts,
    result: Generation,  # of N sequences, with their states
    sequences: jax.Array,  # i32[K]; N or more gives an arbitrary row
) -> SteeredRows | None:
    """Return the rows of sequences, or None without a logits processor."""
    if steering is None:
        return None
    num_samples = result.lengths.shape[0] // prompts.lengths.shape[0]
    whole = all_rows(steering, prompts, result.steering_state, num_samples)
    return whole.pick(sequences)


def all_rows(
    steering: Steering, prompts: Prompts, state: Any, num_each: int
) -> SteeredRows:
    """Return the rows of all sequences, `num_each` of each prompt in turn."""
    assert prompts.variants is not None, "prompts that are steered have variants"
    is_steered = jnp.repeat(prompts.variants >= 0, num_each)
    return SteeredRows(steering, state, is_steered)


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


def as_steering(steering: Steering | None) -> Steering | None:
    """Return the logits processor with its leaves as arrays; None for None."""
    if steering is None:
        return None
    check_steering(steering, "steering")
    for leaf in jax.tree.leaves(steering):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
            raise UsageError(
                f"{_name(steering)} must be a pytree of arrays, got a leaf of "
                f"type {type(leaf).__name__}; decorate its dataclass with "
                f"@jax.tree_util.register_dataclass and mark other fields as static"
            )
    return jax.tree.map(jnp.asarray, steering)


def check_steering_of(state: Any, steering: Steering | None) -> None:
    """Check that a logits processor is given if and only if it was at the start."""
    if (state is None) != (steering is None):
        was, now = ("without", "with") if state is None else ("with", "without")
        raise UsageError(
            f"this generation was begun {was} steering and continues {now} it; pass "
            f"the same to `begin` or `prefill`, every `decode` and `add_prompts`"
        )


def with_variants(prompts: Prompts, steering: Steering | None) -> Prompts:
    """Return prompts with a variant each; refuse variants known to be invalid."""
    given = prompts.variants
    if steering is None:
        is_traced = isinstance(given, jax.core.Tracer)
        # The first variant and -1 need no logits processor.
        if given is not None and (
            is_traced or not np.isin(np.asarray(given), (0, -1)).all()
        ):
            raise UsageError(
                "variants need a logits processor; pass steering=, or omit variants"
            )
        return dataclasses.replace(prompts, variants=None)
    if given is None:
        given = jnp.zeros_like(prompts.lengths)
    if not isinstance(given, jax.core.Tracer):
        wrong = np.asarray(given)[find_unknown(np.asarray(given), steering)]
        if wrong.size:
            raise UsageError(
                f"variants of {_name(steering)} must be from 0 to "
                f"{steering.num_variants - 1}, or -1 for none, "
                f"got {int(wrong[0])}"
            )
    return dataclasses.replace(prompts, variants=jnp.asarray(given))


def find_unknown(variants: Any, steering: Steering) -> Any:
    """Return True for invalid variants, i32[Q], bool[Q]."""
    return (variants < -1) | (variants >= steering.num_variants)


def begin_rows(
    steering: Steering | None,  # the logits processor
    prompts: Prompts,
    num_samples: int,  # sequences of each prompt
) -> Any:
    """Return the initial state of sequences, [N, ...]; None without a processor."""
    if steering is None:
        return None
    variants = prompts.variants
    assert variants is not None, "prompts that are steered have variants"
    num_sequences = variants.shape[0] * num_samples
    known = jnp.where(find_unknown(variants, steering), -1, variants)
    state = steering.begin(
        jnp.repeat(known, num_samples), jnp.repeat(prompts.tokens, num_samples, axis=0)
    )
    for leaf in jax.tree.leaves(state):
        name, why = f"each leaf of {_name(steering)}.begin", "a row for each sequence"
        expect(name, leaf, "N ...", {"N": num_sequences}, why=why)
    return state


def resume_rows(steering: Steering | None, begun: Any, given: Any) -> Any:
    """Return the state of an earlier call after a check of its structure."""
    if steering is None:
        raise UsageError("steering_state needs a logits processor; pass steering=")
    _check_same(steering, begun, given, "the steering_state of the call before")
    return given


def _check_same(
    steering: Steering, old: Any, new: Any, what: str = "what `advance` returns"
) -> None:
    """Check that a state has the structure, shapes and dtypes of the one before."""

    def describe(state: Any) -> list[str]:
        leaves, structure = jax.tree.flatten(state)
        shapes = [f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in leaves]
        return [str(structure), *shapes]

    was, now = describe(old), describe(new)
    if was != now:
        raise UsageError(
            f"{_name(steering)}: {what} must be as `begin` makes it, "
            f"{', '.join(was[1:])}; got {', '.join(now[1:]) or now[0]}"
        )


def _check_array(
    steering: Steering, method: str, array: Any, shape: tuple[int, ...], dtype: Any
) -> None:
    """Check the shape and dtype of a method's result."""
    expected = f"{jnp.dtype(dtype)}{list(shape)}"
    got = f"{jnp.result_type(array)}{list(jnp.shape(array))}"
    if got != expected:
        raise UsageError(
            f"{_name(steering)}.{method} must return {expected}, got {got}"
        )


def _name(steering: object) -> str:
    return type(steering).__name__

"""Prompts with their limits and stop conditions, and the tokens of their sequences.

Symbols: Q prompts, P most prompt tokens, N sequences, G most new tokens; E stop tokens,
F stop sequences of C tokens at most, K lanes. Stop conditions shared by all prompts
have one row instead of Q.
"""

import dataclasses
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import I32, explains_arguments
from jkv.decoding.sequences.results import Generation
from jkv.decoding.sequences.spans import Spans
from jkv.metadata.requests import (
    IntegerRows,
    Integers,
    as_ids,
    as_prompts,
    broadcast,
    check_static,
    pad_rows,
)
from jkv.operations import gather, scatter
from jkv.signatures import set_defaults
from jkv.status import UsageError

# Padding of stop sequences: no token has a negative id.
ANY = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stops:
    """Stop tokens and stop sequences, compared with the end of a completion."""

    tokens: jax.Array  # i32[Q or 1, E], -1 is padding
    # i32[Q or 1, F, C], right-aligned, -1 before each
    sequences: jax.Array | None

    @classmethod
    def of(cls, tokens: Any, sequences: Any | None, num_prompts: int) -> "Stops":
        """Return the stop conditions of Q prompts, shared or with an axis for them."""
        tokens = jnp.asarray(as_stop_tokens(() if tokens is None else tokens))
        if tokens.ndim != 2:
            tokens = tokens.reshape(1, -1)
        _check_rows("stop_tokens", tokens, num_prompts)
        if sequences is None:
            return cls(tokens=tokens, sequences=None)
        sequences = jnp.asarray(as_stop_sequences(sequences))
        if 0 in sequences.shape:
            return cls(tokens=tokens, sequences=None)
        if sequences.ndim == 2:
            sequences = sequences[None]
        _check_rows("stop_sequences", sequences, num_prompts)
        return cls(tokens=tokens, sequences=_to_the_right(sequences))

    def of_prompts(self, prompts: jax.Array) -> "Stops":
        """Return the stop conditions of prompts, i32[K], or the shared ones."""

        def pick(rows: jax.Array) -> jax.Array:
            return rows if rows.shape[0] == 1 else gather(rows, prompts)

        return jax.tree.map(pick, self)

    def replace(self, prompts: jax.Array, stops: "Stops", num_prompts: int) -> "Stops":
        """Replace the stop conditions of prompts, i32[K], by others of one shape."""

        def put(old: jax.Array | None, new: jax.Array | None) -> jax.Array | None:
            was, now = [() if rows is None else rows.shape for rows in (old, new)]
            is_shared = old is not None and old.size and was[0] != num_prompts
            if was[1:] != now[1:] or is_shared:
                raise ValueError(
                    f"stops of added prompts must have the shape of the first "
                    f"call, {list(was)}, got {list(now)}, with rows "
                    f"for {num_prompts} prompts; begin with stop_tokens i32[B, E] and "
                    f"stop_sequences i32[B, F, C], and add both"
                )
            if old is None or new is None:
                return None
            return scatter(old, prompts, new)

        tokens = put(self.tokens, stops.tokens)
        assert tokens is not None
        return Stops(tokens=tokens, sequences=put(self.sequences, stops.sequences))


def as_stop_tokens(tokens: Any) -> np.ndarray[Any, Any] | jax.Array:
    """Return stop tokens, i32[], i32[E] or i32[Q, E]; host values in numpy."""
    return _as_integers(
        "stop_tokens",
        tokens,
        "stop_tokens must be token ids, i32[E], or i32[B, E], a row for each prompt",
        (0, 1, 2),
    )


def as_stop_sequences(sequences: Any) -> np.ndarray[Any, Any] | jax.Array:
    """Return i32[F, C] or i32[Q, F, C], padded with -1; host values in numpy."""
    expected = (
        "stop_sequences must be i32[F, C], one per row and -1 past its end, or "
        "i32[B, F, C] with F for each prompt; or lists of token ids"
    )
    axes = _count_axes(sequences)
    if isinstance(sequences, list | tuple) and axes == 2:
        sequences = pad_rows(sequences, expected)
    elif isinstance(sequences, list | tuple) and axes == 3:
        sequences = _stack([pad_rows(each, expected) for each in sequences])
    elif axes == 1 and not len(sequences):
        sequences = np.zeros((0, 0), np.int32)
    return _as_integers("stop_sequences", sequences, expected, (2, 3))


def _count_axes(values: Any) -> int:
    """Return the depth of nested lists, including the axes of arrays in them."""
    if isinstance(values, list | tuple):
        return 1 + max(map(_count_axes, values), default=0)
    return np.ndim(values)


def _stack(rows: list[Any]) -> np.ndarray[Any, Any] | jax.Array:
    """Stack Q arrays [F, C] to [Q, F, C], padded with -1."""
    xp: Any = jnp if any(isinstance(each, jax.Array) for each in rows) else np
    most = np.max([each.shape for each in rows], axis=0)
    padded = [
        xp.pad(
            each,
            [(0, n - m) for n, m in zip(most, each.shape, strict=True)],
            constant_values=-1,
        )
        for each in rows
    ]
    return xp.stack(padded)


def _as_integers(
    name: str, values: Any, expected: str, axes: tuple[int, ...]
) -> np.ndarray[Any, Any] | jax.Array:
    """Return i32 values with an allowed number of axes; empty lists are integers."""
    is_array = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values))
    try:
        array: Any = (jnp if is_array else np).asarray(values)
    except ValueError:
        raise UsageError(f"{expected}; got lists of different lengths") from None
    is_integer = array.size == 0 or jnp.issubdtype(array.dtype, jnp.integer)
    if array.ndim not in axes or not is_integer:
        raise UsageError(
            f"{expected}, got {array.dtype}{list(array.shape)}; the engine takes "
            f"strings (`stop_strings`), the loops inside jit take token ids"
        )
    return as_ids(name, array)


def _check_rows(name: str, rows: jax.Array, num_prompts: int) -> None:
    if rows.shape[0] not in (1, num_prompts):
        raise ValueError(
            f"{name} must have one row for each of {num_prompts} prompts, or 1, got "
            f"shape {list(rows.shape)}"
        )


def _to_the_right(sequences: jax.Array) -> jax.Array:
    """Right-align padded sequences, i32[..., C]: padding moves to the front."""
    width = sequences.shape[-1]
    column = jax.lax.broadcasted_iota(jnp.int32, sequences.shape, sequences.ndim - 1)
    is_token = jnp.cumprod((sequences >= 0).astype(jnp.int32), axis=-1)
    missing = width - jnp.sum(is_token, axis=-1, dtype=jnp.int32, keepdims=True)
    source = column - missing
    moved = jnp.take_along_axis(sequences, jnp.maximum(source, 0), axis=-1)
    return jnp.where(source < 0, ANY, moved)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prompts:
    """Q prompts, each with `num_samples` completions.

    Example:
      >>> from jkv.decoding import Prompts
      >>> Prompts.of([[5, 6, 7], [40]], limits=[4, 2]).lengths.tolist()
      [3, 1]
    """

    tokens: jax.Array  # i32[Q, P]
    lengths: jax.Array  # i32[Q]
    limits: jax.Array  # i32[Q], most new tokens of each of its sequences
    salts: jax.Array  # i32[Q], cache salts of the prefix index
    priorities: jax.Array  # i32[Q], smaller ones start first
    # i32[Q], variant of the logits processor, -1 for none; None for the first, or
    # without a processor.
    variants: jax.Array | None = None
    stops: Stops | None = None  # None without stop conditions, or after `divide`
    spans: Spans | None = None  # None for causal prompts
    # Static: ids from the vocabulary's size on that prompts may have.
    extra_ids: int = dataclasses.field(default=0, metadata={"static": True})

    @classmethod
    @explains_arguments
    def of(
        cls,
        sequences: IntegerRows,
        *,
        limits: Integers | None = None,
        salts: Integers = 0,
        variants: Integers | None = None,
        stop_tokens: Integers | None = None,
        stop_sequences: IntegerRows | None = None,
        spans: IntegerRows | None = None,
        cacheable_spans: bool = False,
        max_span: int | None = None,
        extra_ids: int = 0,
    ) -> "Prompts":
        """Return prompts from the tokens before each row's first negative entry.

        Args:
          sequences: i32[B, P], -1 past the end of each, or a list of token ids for
            each; an empty prompt is not started. Lists of other lengths compile anew.
          limits: i32[B], most new tokens of each; None is `max_new_tokens`.
          salts: i32[B] or int, cache salts: prefix cache hits are limited to prompts of
            the same salt. Use the version of the weights to keep versions apart.
          variants: i32[B] or int, variant of the logits processor for each prompt,
            below `logits_processor.num_variants`; -1 is none, None the first.
          stop_tokens: i32[E], tokens that finish a sequence; they are kept in the
            result. Or i32[B, E] with a row for each prompt, -1 for none.
          stop_sequences: i32[F, C], -1 past the end of each, or a list of token ids for
            each: a sequence finishes when its new tokens end with one; they are kept in
            the result. Or i32[B, F, C], or a list of such lists, for each prompt.
          spans: i32[B, P], the last position that each token attends to, -1 for a
            causal token: images, or the prefix of a prefix-LM. A span is computed in
            one step; a prompt with one longer than the largest row count, or than
            `max_span`, finishes with SPAN_TOO_LONG.
          cacheable_spans: static; equal token ids imply equal spans, as with an image's
            hash in each of its ids, so that prefix caching may hold spans.
          max_span: static bound on the tokens of a span, which steps with a span cost.
            None is found from concrete spans, and else the largest row count.
          extra_ids: static; with V the model's vocabulary, prompts may have ids up to
            `V + extra_ids - 1`, which are never generated: the model gives them a
            meaning, such as rows of an image.

        Raises:
          UsageError: for arguments of a wrong shape or type.
        """
        tokens = as_prompts(sequences, "prompts")
        if tokens.shape[0] == 0:
            raise ValueError("prompts is empty; give at least one prompt")
        if tokens.shape[1] == 0:
            tokens = jnp.full((tokens.shape[0], 1), -1, jnp.int32)
        check_static("extra_ids", extra_ids, 0)
        num_prompts = tokens.shape[0]
        limits = I32.max if limits is None else limits
        limits, salts = broadcast(num_prompts, limits=limits, salts=salts)
        if variants is not None:
            (variants,) = broadcast(num_prompts, variants=variants)
        stops = None
        if stop_tokens is not None or stop_sequences is not None:
            stops = Stops.of(stop_tokens, stop_sequences, num_prompts)
        found = None
        if spans is not None:
            found = Spans.of(spans, tokens, max_span, cacheable_spans)
        return cls(
            tokens=tokens,
            lengths=count_tokens(tokens),
            limits=jnp.asarray(limits),
            salts=jnp.asarray(salts),
            priorities=jnp.zeros((num_prompts,), jnp.int32),
            variants=variants,
            stops=stops,
            spans=found,
            extra_ids=extra_ids,
        )

    def divide(self, max_new_tokens: int) -> "tuple[Prompts, Stops]":
        """Cap `limits` at `max_new_tokens` and split off the stop conditions."""
        limits = jnp.minimum(self.limits, max_new_tokens)
        stops = self.stops or Stops.of(None, None, self.lengths.shape[0])
        return dataclasses.replace(self, limits=limits, stops=None), stops


class PromptFields(TypedDict, total=False):
    """The arguments of `Prompts.of`, as keyword arguments of a loop."""

    limits: Integers | None
    salts: Integers
    variants: Integers | None
    stop_tokens: Integers | None
    stop_sequences: IntegerRows | None
    spans: IntegerRows | None
    cacheable_spans: bool
    max_span: int | None
    extra_ids: int


set_defaults(PromptFields, Prompts.of)


def count_tokens(sequences: jax.Array) -> jax.Array:
    """Count the tokens before each row's first negative entry, i32[B, P] to i32[B]."""
    is_token = jnp.cumprod((sequences >= 0).astype(jnp.int32), axis=1, dtype=jnp.int32)
    return jnp.sum(is_token, axis=1, dtype=jnp.int32)


def find_malformed(prompts: Prompts, vocabulary: int) -> jax.Array:
    """Return True for malformed prompts, bool[Q], which are never started.

    Malformed are a token after the first -1, an id below -1 or outside of the
    vocabulary, and a span past the end of the prompt. For concrete tokens, outside
    jit, wrong ids raise UsageError.
    """
    tokens, vocabulary = prompts.tokens, vocabulary + prompts.extra_ids
    if not isinstance(tokens, jax.core.Tracer):
        _check_tokens(np.asarray(tokens), vocabulary)
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    is_behind = (tokens >= 0) & (column >= prompts.lengths[:, None])
    is_wrong = jnp.any(is_behind | (tokens < -1) | (tokens >= vocabulary), axis=1)
    if prompts.spans is not None:
        is_wrong |= prompts.spans.are_malformed(prompts.lengths)
    return is_wrong


def _check_tokens(tokens: np.ndarray[Any, Any], vocabulary: int) -> None:
    """Raise UsageError for the first malformed prompt of i32[Q, P]."""
    is_behind = (tokens >= 0) & np.logical_or.accumulate(tokens < 0, axis=1)
    for row, column in np.argwhere(is_behind | (tokens < -1) | (tokens >= vocabulary)):
        raise UsageError(
            f"prompt {row} has {tokens[row, column]} at position {column}; a prompt is "
            f"token ids from 0 to {vocabulary - 1} from the first position on, and -1 "
            f"past its end only (no padding on the left, none between tokens)"
        )


def refuse_unknown(
    name: str,  # name of a sequence in messages
    sequences: jax.Array,  # i32[B, P], negative past the end of each
    vocabulary: int,  # vocabulary size, V
) -> None:
    """Raise UsageError for token ids outside of the vocabulary, outside jit."""
    if isinstance(sequences, jax.core.Tracer):
        return
    tokens = np.asarray(sequences)
    is_token = np.logical_and.accumulate(tokens >= 0, axis=1)
    for row, column in np.argwhere(is_token & (tokens >= vocabulary)):
        raise UsageError(
            f"{name} {row} has {tokens[row, column]} at position {column}; the model's "
            f"logits are of token ids from 0 to {vocabulary - 1}"
        )


def find_tokens(
    prompts: Prompts,
    result: Generation,  # of N sequences
    sequences: jax.Array,  # i32[...]
    positions: jax.Array,  # i32[...], in the sequence
) -> jax.Array:
    """Return tokens of sequences, prompt and completion, i32[...]; 0 past the end."""
    num_samples = result.tokens.shape[0] // prompts.tokens.shape[0]
    prompt = jax.lax.div(sequences, jnp.int32(num_samples))
    behind = positions - gather(prompts.lengths, prompt)
    given = gather(prompts.tokens, (prompt, positions))
    generated = gather(result.tokens, (sequences, jnp.maximum(behind, 0)))
    return jnp.maximum(jnp.where(behind < 0, given, generated), 0)


def find_sequences(
    prompts: Prompts,
    result: Generation,  # of N sequences
    sequences: jax.Array,  # i32[K]
) -> tuple[jax.Array, jax.Array]:
    """Return whole sequences, i32[K, P + G], padded with -1; and lengths, i32[K]."""
    num_samples = result.tokens.shape[0] // prompts.tokens.shape[0]
    prompt = jax.lax.div(sequences, jnp.int32(num_samples))
    lengths = gather(prompts.lengths, prompt) + gather(result.lengths, sequences)
    width = prompts.tokens.shape[1] + result.tokens.shape[1]
    position = jnp.arange(width, dtype=jnp.int32)[None]
    tokens = find_tokens(prompts, result, sequences[:, None], position)
    return jnp.where(position < lengths[:, None], tokens, -1), lengths

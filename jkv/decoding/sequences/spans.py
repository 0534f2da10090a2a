"""Spans of prompts: tokens that attend to each other, such as those of an image.

A span is computed in one step, so chunks end at borders between spans. A position is a
border if no earlier token's span reaches it.

Symbols: Q prompts, P most tokens of a prompt, B sequences, R rows of a step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import I32, expect
from jkv.masks import SpanMask
from jkv.metadata.requests import check_static
from jkv.operations import gather
from jkv.status import UsageError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """The spans of Q prompts, by position in the prompt."""

    ends: jax.Array  # i32[Q, P], last token that each token attends to, -1: itself
    # i32[Q, P + 1], the last border at or before, and the first border after, each
    # position.
    borders: jax.Array
    next_borders: jax.Array
    # Static: bound on the tokens of a span; None if the spans are traced without one.
    longest: int | None = dataclasses.field(metadata={"static": True})
    # Static: equal tokens have equal spans, so that prefixes may be cached.
    cacheable: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(
        cls, ends: Any, tokens: jax.Array, max_span: int | None, cacheable: bool
    ) -> "Spans":
        """Return the spans of prompts from the end of each token's span."""
        ends = as_ends(ends, tokens)
        if max_span is None:
            max_span = _bound_spans(ends)
        else:
            check_static("max_span", max_span, 1)
        if not isinstance(cacheable, bool):
            raise UsageError(
                f"cacheable_spans must be True or False, got {cacheable!r}; it is "
                f"static"
            )
        position = jnp.arange(ends.shape[1], dtype=jnp.int32)[None]
        reach = jax.lax.cummax(jnp.maximum(ends, position), axis=1)
        # Position p is a border if no token before reaches it; 0 always is.
        is_border = jnp.pad(reach <= position, ((0, 0), (1, 0)), constant_values=True)
        at = jnp.arange(ends.shape[1] + 1, dtype=jnp.int32)[None]
        borders = jax.lax.cummax(jnp.where(is_border, at, 0), axis=1)
        after = jnp.where(is_border, at, I32.max)
        after = jnp.pad(after[:, 1:], ((0, 0), (0, 1)), constant_values=I32.max)
        return cls(
            ends=ends,
            borders=borders,
            next_borders=jax.lax.cummin(after, axis=1, reverse=True),
            longest=max_span,
            cacheable=cacheable,
        )

    def count_least(self, prompts: jax.Array, done: jax.Array) -> jax.Array:
        """Return the least rows that end at a border, i32[B]; 1 past the prompt.

        Args:
          prompts: i32[B], the prompt of each sequence.
          done: i32[B], its computed tokens.
        """
        next_border = gather(self.next_borders, (prompts, done), fill=I32.max)
        return jnp.where(next_border == I32.max, 1, next_border - done)

    def end_at_borders(
        self, prompts: jax.Array, done: jax.Array, counts: jax.Array
    ) -> jax.Array:
        """Shorten the rows of sequences, i32[B], to end at a border."""
        end = done + counts
        border = gather(self.borders, (prompts, end), fill=I32.max)
        return jnp.maximum(jnp.minimum(end, border) - done, 0)

    def cut_before(self, sequences: jax.Array, prompts: jax.Array) -> jax.Array:
        """Return sequences, i32[K, T], up to the first span; cacheable spans stay.

        Cached blocks of equal tokens without the span have other keys.
        """
        if self.cacheable:
            return sequences
        at = jnp.arange(self.ends.shape[1], dtype=jnp.int32)[None]
        first = jnp.min(jnp.where(self.ends > at, at, I32.max), axis=1)
        position = jnp.arange(sequences.shape[1], dtype=jnp.int32)[None]
        return jnp.where(position < gather(first, prompts)[:, None], sequences, -1)

    def mask(
        self, prompts: jax.Array, positions: jax.Array, done: jax.Array
    ) -> SpanMask:
        """Return the mask of a step.

        Args:
          prompts: i32[R], the prompt of each row.
          positions: i32[R], position of each row in its sequence.
          done: i32[R], computed tokens of the row's sequence before the step.
        """
        ends = gather(self.ends, (prompts, positions), fill=-1)
        return SpanMask(jnp.where(ends >= 0, ends - done, -1), cacheable=self.cacheable)

    def bound(self, num_rows: int) -> int:
        """Return the static bound of spans in a step of `num_rows` rows."""
        return num_rows if self.longest is None else min(self.longest, num_rows)

    def are_too_long(self, num_rows: int) -> jax.Array:
        """Return True for prompts with a span that no step of `num_rows` fits, bool[Q].

        Overlapping spans are computed in one step.
        """
        at = jnp.arange(self.borders.shape[1], dtype=jnp.int32)[None]
        is_border = self.borders == at
        next_border = jnp.where(self.next_borders == I32.max, at, self.next_borders)
        is_long = jnp.any(is_border & (next_border - at > num_rows), axis=1)
        if self.longest is not None:
            is_long |= jnp.any(self.ends - at[:, :-1] >= self.longest, axis=1)
        return is_long

    def are_malformed(self, lengths: jax.Array) -> jax.Array:
        """Return True for prompts, of i32[Q] tokens, with a span past their end."""
        return jnp.any(self.ends >= lengths[:, None], axis=1)


def match_spans(old: Spans | None, new: Spans | None, tokens: jax.Array) -> Spans:
    """Return the spans of added prompts with the static fields of the first call.

    Raises:
      UsageError: spans without spans in the first call, or of other static fields.
    """
    if old is None:
        raise UsageError(
            "spans must be None, as the first call had no spans; pass spans of -1 there"
        )
    if new is None:
        nothing = jnp.full(tokens.shape, -1, jnp.int32)
        return Spans.of(nothing, tokens, old.longest, old.cacheable)
    is_longer = old.longest is not None and (new.longest or I32.max) > old.longest
    if is_longer or new.cacheable != old.cacheable:
        raise UsageError(
            f"spans must have the max_span={old.longest} and cacheable_spans="
            f"{old.cacheable} of the first call, got {new.longest} and "
            f"{new.cacheable}; pass a larger max_span there"
        )
    return dataclasses.replace(new, longest=old.longest)


def as_ends(ends: Any, tokens: jax.Array) -> jax.Array:
    """Return the ends of spans, lists or an array, as i32[Q, P]."""
    num_prompts, width = tokens.shape
    if isinstance(ends, list | tuple):
        rows = [[*row, *[-1] * (width - len(row))] for row in ends]
        ends = np.asarray(rows)
    sizes, why = {"B": num_prompts, "P": width}, "one end per token of the prompts"
    expect("spans", ends, "B P", sizes, jnp.integer, why=why)
    return jnp.asarray(ends, jnp.int32)


def _bound_spans(ends: jax.Array) -> int | None:
    """Return the next power of two of the longest span's tokens, None if traced."""
    if isinstance(ends, jax.core.Tracer):
        return None
    position = np.arange(ends.shape[1])[None]
    longest = int((np.asarray(ends) - position).max(initial=0)) + 1
    return 1 << (longest - 1).bit_length()

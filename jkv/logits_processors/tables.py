"""Shared helpers of logits processors: tables by variant, newest tokens, masks.

Symbols: N sequences, M variants, K rows or sequences, C tokens, V vocabulary size.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jkv.arguments import expect


def count_variants(
    table: Any,  # an array or a number
    num_axes: int,  # number of axes without variants
) -> int:
    """Return the number of variants of an array; 1 without an axis of variants."""
    shape = jnp.shape(table)
    return shape[0] if len(shape) > num_axes else 1


def find_rows(
    table: Any,  # an array or a number
    num_axes: int,  # number of axes without variants
    variants: jax.Array,  # i32[K]
) -> jax.Array:
    """Return the row of each sequence's variant, [K, ...]."""
    table = jnp.asarray(table)
    if table.ndim > num_axes:
        return table[variants]
    return jnp.broadcast_to(table[None], (variants.shape[0], *table.shape))


def check_integers(where: str, array: Any, axes: str) -> jax.Array:
    """Return an array or a number as i32; `axes` as in `expect`."""
    given = jnp.asarray(array)
    expect(where, given, axes, kind=jnp.integer)
    return given.astype(jnp.int32)


def check_numbers(where: str, array: Any, axes: str) -> jax.Array:
    """Return an array or a number as f32; `axes` as in `expect`."""
    given = jnp.asarray(array)
    expect(where, given, axes, kind=jnp.number)
    return given.astype(jnp.float32)


def align_right(
    tokens: jax.Array,  # i32[..., C], padded with -1
) -> jax.Array:
    """Return token lists with the padding of -1 moved to the front."""
    num_missing = jnp.sum(tokens < 0, axis=-1, keepdims=True, dtype=jnp.int32)
    column = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    column = jnp.expand_dims(column, tuple(range(tokens.ndim - 1))) - num_missing
    moved = jnp.take_along_axis(tokens, jnp.maximum(column, 0), axis=-1)
    return jnp.where(column < 0, -1, moved)


def find_newest(
    prompts: jax.Array,  # i32[N, P], padded with -1
    count: int,  # T
) -> jax.Array:
    """Return the last tokens of prompts, i32[N, T], left-padded with -1."""
    missing = max(count - prompts.shape[1], 0)
    aligned = jnp.pad(align_right(prompts), ((0, 0), (missing, 0)), constant_values=-1)
    return aligned[:, aligned.shape[1] - count :]


def push(
    newest: jax.Array,  # i32[N, T]
    tokens: jax.Array,  # i32[N], -1 for none, which keeps the row
) -> jax.Array:
    """Return the newest tokens after appending one, i32[N, T]."""
    pushed = jnp.concatenate([newest, tokens[:, None]], axis=1)[:, 1:]
    return jnp.where(tokens[:, None] < 0, newest, pushed)


def ends_with(
    newest: jax.Array,  # i32[N, T]
    tokens: jax.Array,  # i32[C], C at most T
) -> jax.Array:
    """Return True for sequences that end with the token list, bool[N]."""
    last = newest[:, newest.shape[1] - tokens.shape[0] :]
    return jnp.all(last == tokens[None], axis=1)


def mark_tokens(
    tokens: jax.Array,  # i32[K, E], -1 for none
    logits: jax.Array,  # f32[K, V]
) -> jax.Array:
    """Return True for the tokens of each row, bool[K, V]."""
    mask = jnp.zeros(logits.shape, bool)
    return mask.at[find_columns(tokens, logits)].set(True, mode="drop")


def find_columns(
    tokens: jax.Array,  # i32[K, E], -1 for none
    logits: jax.Array,  # f32[K, V]
) -> tuple[jax.Array, jax.Array]:  # i32[K, 1], i32[K, E]
    """Return the indices of tokens in the logits, out of range for -1."""
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return row, jnp.where(tokens < 0, logits.shape[1], tokens)


def forbid(
    logits: jax.Array,  # f32[K, V]
    tokens: jax.Array,  # i32[K, E], -1 for none
) -> jax.Array:
    """Return logits, f32[K, V], with -inf at some tokens of each row.

    Scattering into a mask instead of the logits avoids a copy of the logits, which are
    read again and have four times the bytes.
    """
    return jnp.where(mark_tokens(tokens, logits), -jnp.inf, logits)

"""Arrays and tokens that logits processors share: rows of variants, newest tokens.

Symbols: N texts, M variants, K rows or sequences, C tokens, V tokens in the vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jkv.arguments import expect


def count_variants(
    table: Any,  # an array or a number
    num_axes: int,  # those that it has when it holds for all
) -> int:
    """Return how many variants an array tells apart; one if it holds for all."""
    shape = jnp.shape(table)
    return shape[0] if len(shape) > num_axes else 1


def find_rows(
    table: Any,  # an array or a number
    num_axes: int,  # those that it has when it holds for all
    variants: jax.Array,  # i32[K]
) -> jax.Array:
    """Return what holds for each sequence, [K, ...]."""
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
    tokens: jax.Array,  # i32[..., C], -1 after each one's end
) -> jax.Array:
    """Return lists of tokens, -1 before each one's begin instead of after its end."""
    num_missing = jnp.sum(tokens < 0, axis=-1, keepdims=True, dtype=jnp.int32)
    column = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    column = jnp.expand_dims(column, tuple(range(tokens.ndim - 1))) - num_missing
    moved = jnp.take_along_axis(tokens, jnp.maximum(column, 0), axis=-1)
    return jnp.where(column < 0, -1, moved)


def find_newest(
    prompts: jax.Array,  # i32[N, P], -1 after each one's end
    count: int,  # T
) -> jax.Array:
    """Return the newest tokens of prompts, i32[N, T], -1 where one has fewer."""
    missing = max(count - prompts.shape[1], 0)
    aligned = jnp.pad(align_right(prompts), ((0, 0), (missing, 0)), constant_values=-1)
    return aligned[:, aligned.shape[1] - count :]


def push(
    newest: jax.Array,  # i32[N, T]
    tokens: jax.Array,  # i32[N], -1 where there is none: the row stays
) -> jax.Array:
    """Return the newest tokens after one more, i32[N, T]."""
    pushed = jnp.concatenate([newest, tokens[:, None]], axis=1)[:, 1:]
    return jnp.where(tokens[:, None] < 0, newest, pushed)


def ends_with(
    newest: jax.Array,  # i32[N, T]
    tokens: jax.Array,  # i32[C], C at most T
) -> jax.Array:
    """Return which texts end with a list of tokens, bool[N]."""
    last = newest[:, newest.shape[1] - tokens.shape[0] :]
    return jnp.all(last == tokens[None], axis=1)


def find_columns(
    tokens: jax.Array,  # i32[K, E], -1 for none
    logits: jax.Array,  # f32[K, V]
) -> tuple[jax.Array, jax.Array]:  # i32[K, 1], i32[K, E]
    """Return where the logits of tokens stand; those of -1 are out of range."""
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return row, jnp.where(tokens < 0, logits.shape[1], tokens)


def forbid(
    logits: jax.Array,  # f32[K, V]
    tokens: jax.Array,  # i32[K, E], -1 for none
) -> jax.Array:
    """Return logits, f32[K, V], with -inf at some tokens of each row.

    A mask is written, not the logits: those of the model are needed once more, and a
    copy of them has four times its bytes.
    """
    mask = jnp.zeros(logits.shape, bool)
    mask = mask.at[find_columns(tokens, logits)].set(True, mode="drop")
    return jnp.where(mask, -jnp.inf, logits)

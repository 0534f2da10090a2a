"""What stops texts: tokens and sequences of tokens, of all prompts or of each.

Symbols: Q prompts, E stop tokens, F stop sequences of C tokens at most, K lanes. What
stops all prompts alike has one row for all Q of them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.indexing import gather, scatter
from jkv.metadata.requests import as_ids, pad_rows
from jkv.status import UsageError

# Beside a token of a text there can be no such number.
ANY = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stops:
    """What ends a text when its new tokens end with it."""

    tokens: jax.Array  # i32[Q or 1, E], -1 stops nothing
    # i32[Q or 1, F, C], -1 before each one, to the right
    sequences: jax.Array | None

    @classmethod
    def of(cls, tokens: Any, sequences: Any | None, num_prompts: int) -> "Stops":
        """Take what stops all prompts, or with an axis more each of Q prompts."""
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
        """Return what stops each of these prompts, i32[K], or all of them alike."""

        def pick(rows: jax.Array) -> jax.Array:
            return rows if rows.shape[0] == 1 else gather(rows, prompts)

        return jax.tree.map(pick, self)

    def replace(self, prompts: jax.Array, stops: "Stops", num_prompts: int) -> "Stops":
        """Return these with those, of one shape, of some other prompts, i32[K] of Q."""

        def put(old: jax.Array | None, new: jax.Array | None) -> jax.Array | None:
            was, now = [() if rows is None else rows.shape for rows in (old, new)]
            is_shared = old is not None and old.size and was[0] != num_prompts
            if was[1:] != now[1:] or is_shared:
                raise ValueError(
                    f"what stops added prompts must have the shape of the first call: "
                    f"its stops are {list(was)}, those added {list(now)}, with rows "
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
    """Return stop tokens, i32[], i32[E] or i32[Q, E]; in numpy what it can hold."""
    return _as_integers(
        "stop_tokens",
        tokens,
        "stop_tokens must be token ids, i32[E], or i32[B, E] with those of each prompt",
        (0, 1, 2),
    )


def as_stop_sequences(sequences: Any) -> np.ndarray[Any, Any] | jax.Array:
    """Return i32[F, C] or i32[Q, F, C], -1 behind; in numpy what it can hold."""
    expected = (
        "stop_sequences must be i32[F, C], one a row and -1 after its end, or "
        "i32[B, F, C] with those of each prompt; or lists of token ids"
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
    """Return how deep lists are nested, with the axes of arrays in them."""
    if isinstance(values, list | tuple):
        return 1 + max(map(_count_axes, values), default=0)
    return np.ndim(values)


def _stack(rows: list[Any]) -> np.ndarray[Any, Any] | jax.Array:
    """Return what each of Q prompts has, [F, C], as [Q, F, C], filled up with -1."""
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
    """Return integers with so many axes as i32; nothing has no dtype of its own."""
    is_array = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values))
    try:
        array: Any = (jnp if is_array else np).asarray(values)
    except ValueError:
        raise UsageError(f"{expected}; got lists of different lengths") from None
    is_integer = array.size == 0 or jnp.issubdtype(array.dtype, jnp.integer)
    if array.ndim not in axes or not is_integer:
        raise UsageError(
            f"{expected}, got {array.dtype}{list(array.shape)}; the engine stops at "
            f"strings (`stop_strings`), the loops inside jit at token ids"
        )
    return as_ids(name, array)


def _check_rows(name: str, rows: jax.Array, num_prompts: int) -> None:
    if rows.shape[0] not in (1, num_prompts):
        raise ValueError(
            f"{name} must have one row for each of {num_prompts} prompts, or none; got "
            f"shape {list(rows.shape)}"
        )


def _to_the_right(sequences: jax.Array) -> jax.Array:
    """Move sequences, i32[..., C], to the right, -1 in front instead of behind."""
    width = sequences.shape[-1]
    column = jax.lax.broadcasted_iota(jnp.int32, sequences.shape, sequences.ndim - 1)
    is_token = jnp.cumprod((sequences >= 0).astype(jnp.int32), axis=-1)
    missing = width - jnp.sum(is_token, axis=-1, dtype=jnp.int32, keepdims=True)
    source = column - missing
    moved = jnp.take_along_axis(sequences, jnp.maximum(source, 0), axis=-1)
    return jnp.where(source < 0, ANY, moved)

"""Prompts: what is to be continued, how far, what stops it, and what has come of each.

Symbols: Q prompts, P most prompt tokens, N sequences, G most new tokens; E stop tokens,
F stop sequences of C tokens at most, K lanes. What stops all prompts alike has one row
for all Q of them.
"""

import dataclasses
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import explains_arguments
from jkv.decoding.texts.results import Generation
from jkv.indexing import gather, scatter
from jkv.metadata.requests import (
    I32,
    Integers,
    Texts,
    as_ids,
    as_prompts,
    broadcast,
    pad_rows,
)
from jkv.signatures import set_defaults
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prompts:
    """Q prompts, each continued by as many sequences as there are samples.

    Example:
      >>> from jkv.decoding import Prompts
      >>> Prompts.of([[5, 6, 7], [40]], limits=[4, 2]).lengths.tolist()
      [3, 1]
    """

    tokens: jax.Array  # i32[Q, P]
    lengths: jax.Array  # i32[Q]
    limits: jax.Array  # i32[Q], most new tokens of each of its sequences
    salts: jax.Array  # i32[Q], domain of the prefix index
    priorities: jax.Array  # i32[Q], smaller ones are begun before larger ones
    # i32[Q], how each is steered, -1 not at all; None if nothing was said, or is
    variants: jax.Array | None = None
    stops: Stops | None = None  # what ends them; None if nothing was said, or is apart

    @classmethod
    @explains_arguments
    def of(
        cls,
        texts: Texts,
        *,
        limits: Integers | None = None,
        salts: Integers = 0,
        variants: Integers | None = None,
        stop_tokens: Integers | None = None,
        stop_sequences: Texts | None = None,
    ) -> "Prompts":
        """Take the tokens before each row's first negative entry.

        Args:
          texts: i32[B, P], -1 after each prompt's end, or a list of token ids for each;
            one that is empty is not begun. Lists of other lengths compile anew.
          limits: i32[B], most new tokens of each; None is as many as of any.
          salts: i32[B] or int, domains of the prefix cache, if the cache has one: what
            earlier prompts of a domain left behind is not computed again. The number of
            the weights keeps versions apart.
          variants: i32[B] or int, how each prompt is steered, of
            `steering.num_variants` ways; -1 is not at all, None the first of them.
          stop_tokens: i32[E], tokens that end a sequence; they are kept in the result.
            Each prompt can have its own, i32[B, E] with -1 for none.
          stop_sequences: i32[F, C], -1 after each one's end, or a list of token ids for
            each: a sequence ends when its new tokens end with one of them; they are
            kept. Of each prompt: i32[B, F, C], or a list of such lists.

        Raises:
          UsageError: for arguments of a wrong shape or type.
        """
        tokens = as_prompts(texts, "prompts")
        if tokens.shape[0] == 0:
            raise ValueError("prompts is empty; give at least one prompt")
        if tokens.shape[1] == 0:
            tokens = jnp.full((tokens.shape[0], 1), -1, jnp.int32)
        num_prompts = tokens.shape[0]
        limits = I32.max if limits is None else limits
        limits, salts = broadcast(num_prompts, limits=limits, salts=salts)
        if variants is not None:
            (variants,) = broadcast(num_prompts, variants=variants)
        stops = None
        if stop_tokens is not None or stop_sequences is not None:
            stops = Stops.of(stop_tokens, stop_sequences, num_prompts)
        return cls(
            tokens=tokens,
            lengths=count_tokens(tokens),
            limits=jnp.asarray(limits),
            salts=jnp.asarray(salts),
            priorities=jnp.zeros((num_prompts,), jnp.int32),
            variants=variants,
            stops=stops,
        )

    def divide(self, max_new_tokens: int) -> "tuple[Prompts, Stops]":
        """Return them with limits of so many new tokens, and apart what ends them."""
        limits = jnp.minimum(self.limits, max_new_tokens)
        stops = self.stops or Stops.of(None, None, self.lengths.shape[0])
        return dataclasses.replace(self, limits=limits, stops=None), stops


class OfPrompts(TypedDict, total=False):
    """What is said of each prompt, as arguments of a loop; as `Prompts.of` has it."""

    limits: Integers | None
    salts: Integers
    variants: Integers | None
    stop_tokens: Integers | None
    stop_sequences: Texts | None


set_defaults(OfPrompts, Prompts.of)


def count_tokens(texts: jax.Array) -> jax.Array:
    """Count the tokens before each row's first negative entry, i32[B, P] to i32[B]."""
    is_token = jnp.cumprod((texts >= 0).astype(jnp.int32), axis=1, dtype=jnp.int32)
    return jnp.sum(is_token, axis=1, dtype=jnp.int32)


def find_malformed(prompts: Prompts, vocabulary: int) -> jax.Array:
    """Return which prompts are no texts, bool[Q]: they are never begun.

    A token behind the first -1, an id below -1, or one that the model does not know;
    outside of jit, where the tokens are known, these raise UsageError.
    """
    tokens = prompts.tokens
    if not isinstance(tokens, jax.core.Tracer):
        _check_tokens(np.asarray(tokens), vocabulary)
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    is_behind = (tokens >= 0) & (column >= prompts.lengths[:, None])
    return jnp.any(is_behind | (tokens < -1) | (tokens >= vocabulary), axis=1)


def _check_tokens(tokens: np.ndarray[Any, Any], vocabulary: int) -> None:
    """Refuse prompts, i32[Q, P], that are no texts."""
    is_behind = (tokens >= 0) & np.logical_or.accumulate(tokens < 0, axis=1)
    for row, column in np.argwhere(is_behind | (tokens < -1) | (tokens >= vocabulary)):
        raise UsageError(
            f"prompt {row} has {tokens[row, column]} at position {column}; a prompt is "
            f"token ids from 0 to {vocabulary - 1} from the first position on, and -1 "
            f"behind its end only (no padding on the left, none between tokens)"
        )


def refuse_unknown(
    name: str,  # what the texts are, one of them
    texts: jax.Array,  # i32[B, P], negative past each text's end
    vocabulary: int,  # tokens that the model knows, V
) -> None:
    """Refuse texts with a token that the model does not know, outside of jit."""
    if isinstance(texts, jax.core.Tracer):
        return
    tokens = np.asarray(texts)
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
    positions: jax.Array,  # i32[...], in the text
) -> jax.Array:
    """Return tokens of texts, prompts and what was generated behind, i32[...]; or 0."""
    num_samples = result.tokens.shape[0] // prompts.tokens.shape[0]
    prompt = jax.lax.div(sequences, jnp.int32(num_samples))
    behind = positions - gather(prompts.lengths, prompt)
    given = gather(prompts.tokens, (prompt, positions))
    generated = gather(result.tokens, (sequences, jnp.maximum(behind, 0)))
    return jnp.maximum(jnp.where(behind < 0, given, generated), 0)


def find_texts(
    prompts: Prompts,
    result: Generation,  # of N sequences
    sequences: jax.Array,  # i32[K]
) -> tuple[jax.Array, jax.Array]:
    """Return whole texts, i32[K, P + G], -1 behind each, and their lengths, i32[K]."""
    num_samples = result.tokens.shape[0] // prompts.tokens.shape[0]
    prompt = jax.lax.div(sequences, jnp.int32(num_samples))
    lengths = gather(prompts.lengths, prompt) + gather(result.lengths, sequences)
    width = prompts.tokens.shape[1] + result.tokens.shape[1]
    position = jnp.arange(width, dtype=jnp.int32)[None]
    tokens = find_tokens(prompts, result, sequences[:, None], position)
    return jnp.where(position < lengths[:, None], tokens, -1), lengths

"""Prompts: what is to be continued, how far, and the text that has come of each.

Symbols: Q prompts, P most prompt tokens, N sequences, G most new tokens, K lanes.
"""

import dataclasses
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import explains_arguments
from jkv.decoding.texts.results import Generation
from jkv.decoding.texts.stops import Stops
from jkv.metadata.requests import I32, Integers, Texts, as_prompts, broadcast
from jkv.status import UsageError


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
    behind = positions - prompts.lengths[prompt]
    given = prompts.tokens.at[prompt, positions].get(mode="clip")
    generated = result.tokens.at[sequences, jnp.maximum(behind, 0)].get(mode="clip")
    return jnp.maximum(jnp.where(behind < 0, given, generated), 0)


def find_texts(
    prompts: Prompts,
    result: Generation,  # of N sequences
    sequences: jax.Array,  # i32[K]
) -> tuple[jax.Array, jax.Array]:
    """Return whole texts, i32[K, P + G], -1 behind each, and their lengths, i32[K]."""
    num_samples = result.tokens.shape[0] // prompts.tokens.shape[0]
    prompt = jax.lax.div(sequences, jnp.int32(num_samples))
    lengths = prompts.lengths[prompt] + result.lengths[sequences]
    width = prompts.tokens.shape[1] + result.tokens.shape[1]
    position = jnp.arange(width, dtype=jnp.int32)[None]
    tokens = find_tokens(prompts, result, sequences[:, None], position)
    return jnp.where(position < lengths[:, None], tokens, -1), lengths

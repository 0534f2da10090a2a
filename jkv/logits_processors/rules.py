"""Logits processors for small rules: allowed, banned, biased and end tokens, n-grams.

Symbols: N sequences, K rows, M variants, V vocabulary size; A allowed tokens, F banned
token lists of up to C tokens, E biased or end tokens; P longest prompt, T tokens of a
sequence that are stored.

`NoRepeatedNgrams` is `no_repeat_ngram_size` of fairseq and transformers; Paulus, Xiong
and Socher used it for trigrams (section 2.5 of arXiv 1705.04304).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.logits_processors.protocol import EndsNothing, Unchanging
from jkv.logits_processors.tables import (
    align_right,
    check_integers,
    count_variants,
    find_columns,
    find_newest,
    find_rows,
    forbid,
    mark_tokens,
    push,
)
from jkv.status import UsageError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AllowedTokens(Unchanging):
    """Mask of all tokens except the given ones.

    It is `allowed_token_ids` of vLLM
    (https://docs.vllm.ai/en/latest/api/vllm/sampling_params/). Include end tokens, if a
    sequence may end. Ids outside the vocabulary are ignored.

    Args:
      tokens: i32[A], -1 for none; i32[M, A] for M variants.

    Raises:
      ValueError: in `begin`, for other dtypes or axes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.logits_processors import AllowedTokens
      >>> digits = AllowedTokens(jnp.array([1, 3, -1]))
      >>> state = digits.begin(jnp.array([0]), jnp.array([[5]]))
      >>> digits.process(state, jnp.ones((1, 4))).tolist()
      [[-inf, 1.0, -inf, 1.0]]
    """

    tokens: jax.Array  # i32[A], or i32[M, A] with M variants

    @property
    def num_variants(self) -> int:
        """Number of variants, M, or 1."""
        return count_variants(self.tokens, 1)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> jax.Array:
        """Return the variant of each sequence, i32[N]."""
        del prompts
        check_integers("AllowedTokens.tokens", self.tokens, "A | M A")
        return variants

    def process(self, state: jax.Array, logits: jax.Array) -> jax.Array:
        """Mask all other tokens."""
        tokens = find_rows(jnp.asarray(self.tokens, jnp.int32), 1, state)
        return jnp.where(mark_tokens(tokens, logits), logits, -jnp.inf)


class _BanRows(NamedTuple):
    """State of N sequences."""

    newest: jax.Array  # i32[N, C - 1]
    variants: jax.Array  # i32[N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BannedSequences(EndsNothing):
    """Ban on lists of tokens.

    The last token of a list is masked if the previous ones are the newest of the
    sequence, including the prompt; a list of one token is always masked. This equals
    transformers' `NoBadWordsLogitsProcessor` for sequences at least as long as the
    list. A tokenizer may encode the same words by other tokens: pass each encoding.

    Args:
      sequences: i32[F, C], padded with -1; i32[M, F, C] for M variants.

    Raises:
      ValueError: in `begin`, for other dtypes or axes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.logits_processors import BannedSequences
      >>> banned = BannedSequences(jnp.array([[1, 2], [3, -1]]))
      >>> state = banned.begin(jnp.array([0]), jnp.array([[7, 1]]))
      >>> banned.process(state, jnp.ones((1, 5))).tolist()
      [[1.0, 1.0, -inf, -inf, 1.0]]
    """

    sequences: jax.Array  # i32[F, C], or i32[M, F, C] with M variants

    @property
    def num_variants(self) -> int:
        """Number of variants, M, or 1."""
        return count_variants(self.sequences, 2)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> _BanRows:
        """Return the newest tokens and the variant of each sequence."""
        sequences = check_integers(
            "BannedSequences.sequences", self.sequences, "F C | M F C"
        )
        return _BanRows(find_newest(prompts, sequences.shape[-1] - 1), variants)

    def process(self, state: _BanRows, logits: jax.Array) -> jax.Array:
        """Mask tokens that would complete a banned list."""
        sequences = align_right(jnp.asarray(self.sequences, jnp.int32))
        sequences = find_rows(sequences, 2, state.variants)
        before, last = sequences[:, :, :-1], sequences[:, :, -1]
        is_there = (before < 0) | (before == state.newest[:, None])
        return forbid(logits, jnp.where(jnp.all(is_there, axis=2), last, -1))

    def advance(self, state: _BanRows, tokens: jax.Array) -> _BanRows:
        """Append the token."""
        return state._replace(newest=push(state.newest, tokens))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TokenBias(Unchanging):
    """Bias added to the logits of some tokens in every step.

    It is `logit_bias` of OpenAI
    (https://platform.openai.com/docs/api-reference/completions), where -100 bans a
    token; here it is an ordinary number, and the token can still be chosen if all
    others are masked. Use -inf to mask a token, and never inf. Biases of a repeated
    token add up.

    Args:
      tokens: i32[E], -1 for none; i32[M, E] for M variants.
      values: f32, with the shape of `tokens`.

    Raises:
      ValueError: in `begin`, for other dtypes or axes, or different shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.logits_processors import TokenBias
      >>> bias = TokenBias(jnp.array([1, 3]), jnp.array([0.5, -jnp.inf]))
      >>> bias.process(bias.begin(jnp.array([0]), jnp.array([[5]])), jnp.ones((1, 4)))
      Array([[ 1. ,  1.5,  1. , -inf]], dtype=float32)
    """

    tokens: jax.Array  # i32[E], or i32[M, E] with M variants
    values: jax.Array  # f32[E], or f32[M, E]

    @property
    def num_variants(self) -> int:
        """Number of variants, M, or 1."""
        return count_variants(self.tokens, 1)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> jax.Array:
        """Return the variant of each sequence, i32[N]."""
        del prompts
        tokens = check_integers("TokenBias.tokens", self.tokens, "E | M E")
        axes = " ".join(map(str, tokens.shape))
        values = jnp.asarray(self.values)
        expect(
            "TokenBias.values", values, axes, kind=jnp.number, why="shaped as tokens"
        )
        return variants

    def process(self, state: jax.Array, logits: jax.Array) -> jax.Array:
        """Add the biases."""
        tokens = jnp.asarray(self.tokens, jnp.int32)
        values = jnp.asarray(self.values, jnp.float32)
        if tokens.ndim == 1:
            # XLA fuses a single row into the reader of the logits.
            tokens, values = tokens[None], values[None]
        else:
            tokens, values = tokens[state], values[state]
        row = jnp.zeros((tokens.shape[0], logits.shape[1]), jnp.float32)
        row = row.at[find_columns(tokens, row)].add(values, mode="drop")
        return logits + row


class _LengthRows(NamedTuple):
    """State of N sequences."""

    lacks: jax.Array  # i32[N], missing tokens before an end token
    variants: jax.Array  # i32[N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MinimumLength(EndsNothing):
    """Mask of end tokens until a sequence has `min_new_tokens`.

    Pass the loop's `stop_tokens` here, too. Stop sequences are not masked.

    Args:
      end_tokens: i32[E], -1 for none; i32[M, E] for M variants.
      min_new_tokens: i32[] or int, new tokens before an end token is allowed; i32[M]
        for M variants.

    Raises:
      ValueError: in `begin`, for other dtypes or axes, or different numbers of
        variants.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.logits_processors import MinimumLength
      >>> short = MinimumLength(jnp.array([2]), min_new_tokens=1)
      >>> state = short.begin(jnp.array([0]), jnp.array([[5, 6]]))
      >>> short.process(state, jnp.ones((1, 4))).tolist()
      [[1.0, 1.0, -inf, 1.0]]
      >>> short.process(short.advance(state, jnp.array([3])), jnp.ones((1, 4))).tolist()
      [[1.0, 1.0, 1.0, 1.0]]
    """

    end_tokens: jax.Array  # i32[E], or i32[M, E] with M variants
    min_new_tokens: jax.Array | int  # i32[], or i32[M] with M variants

    @property
    def num_variants(self) -> int:
        """Number of variants, M, or 1."""
        counts = (
            count_variants(self.end_tokens, 1),
            count_variants(self.min_new_tokens, 0),
        )
        return max(counts)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> _LengthRows:
        """Return the number of missing tokens of each sequence."""
        del prompts
        ends = check_integers("MinimumLength.end_tokens", self.end_tokens, "E | M E")
        least = check_integers(
            "MinimumLength.min_new_tokens", self.min_new_tokens, "| M"
        )
        if ends.ndim == 2 and least.ndim == 1 and len(ends) != len(least):
            raise UsageError(
                f"end_tokens and min_new_tokens must have the same number of "
                f"variants, got {len(ends)} and {len(least)}"
            )
        return _LengthRows(find_rows(least, 0, variants), variants)

    def process(self, state: _LengthRows, logits: jax.Array) -> jax.Array:
        """Mask the end tokens while tokens are missing."""
        ends = jnp.asarray(self.end_tokens, jnp.int32)
        # XLA fuses a single row into the reader of the logits.
        ends = ends[None] if ends.ndim == 1 else ends[state.variants]
        without = forbid(jnp.zeros((len(ends), logits.shape[1]), jnp.float32), ends)
        return jnp.where(state.lacks[:, None] > 0, logits + without, logits)

    def advance(self, state: _LengthRows, tokens: jax.Array) -> _LengthRows:
        """Count the token."""
        return state._replace(lacks=state.lacks - (tokens >= 0).astype(jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class NoRepeatedNgrams(EndsNothing):
    """Mask of tokens that would repeat an n-gram of the sequence or its prompt.

    A state row stores a whole sequence, P + `max_new_tokens` tokens; of a longer one,
    the oldest tokens are dropped. A step compares every token of the sequence with the
    newest `size` - 1.

    Args:
      size: tokens of an n-gram; 1 masks every token of the sequence.
      max_new_tokens: largest number of new tokens of a sequence, over all calls that
        continue it.

    Raises:
      ValueError: in `begin`, if one of them is less than 1 or not an int.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.logits_processors import NoRepeatedNgrams
      >>> pairs = NoRepeatedNgrams(size=2, max_new_tokens=8)
      >>> state = pairs.begin(jnp.array([0]), jnp.array([[1, 3, 1, 2, 1]]))
      >>> pairs.process(state, jnp.ones((1, 5))).tolist()
      [[1.0, 1.0, -inf, -inf, 1.0]]
    """

    # Static, since it determines the program.
    size: int = dataclasses.field(metadata={"static": True})
    # Static, since it determines the shape of the state.
    max_new_tokens: int = dataclasses.field(metadata={"static": True})

    def begin(self, variants: jax.Array, prompts: jax.Array) -> jax.Array:
        """Return the newest tokens of each sequence, i32[N, T]."""
        del variants
        for name in ("size", "max_new_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(
                    f"NoRepeatedNgrams.{name} must be an int >= 1, got {value!r}"
                )
        most = prompts.shape[1] + self.max_new_tokens
        return find_newest(prompts, max(most, self.size))

    def process(self, state: jax.Array, logits: jax.Array) -> jax.Array:
        """Mask tokens that would complete an n-gram of the sequence."""
        num_windows = state.shape[1] - self.size + 1
        # Windows in the padding before the sequence are no n-grams.
        is_again = state[:, :num_windows] >= 0
        for place in range(self.size - 1):
            of_window = state[:, place : place + num_windows]
            newest = state[:, num_windows + place]
            is_again &= of_window == newest[:, None]
        lasts = state[:, self.size - 1 :]
        return forbid(logits, jnp.where(is_again, lasts, -1))

    def advance(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
        """Append the token."""
        return push(state, tokens)

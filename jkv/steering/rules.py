"""Logits processors that are small rules: which tokens a text may have, and when.

Symbols: N texts, K rows, M variants, V tokens in the vocabulary; A tokens that are
allowed, F lists of tokens that are banned, C tokens of the longest, E tokens that are
named or end a text; P most prompt tokens, T tokens of a text that are kept.

`NoRepeatedNgrams` is the rule of fairseq's and transformers' `no_repeat_ngram_size`;
Paulus, Xiong and Socher used it for trigrams (section 2.5 of arXiv 1705.04304).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.status import UsageError
from jkv.steering.protocol import EndsNothing, Unchanging
from jkv.steering.tables import (
    align_right,
    check_integers,
    count_variants,
    find_columns,
    find_newest,
    find_rows,
    forbid,
    push,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AllowedTokens(Unchanging):
    """The only tokens that a text may have.

    It is the `allowed_token_ids` of vLLM's interface
    (https://docs.vllm.ai/en/latest/api/vllm/sampling_params/). End tokens are no
    exception: name them, too, if a text may end. Ids that the model does not have allow
    nothing.

    Args:
      tokens: i32[A], -1 for none; i32[M, A] for tokens of its own for each of M
        variants.

    Raises:
      ValueError: when a text begins, if they are no integers or have other axes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import AllowedTokens
      >>> digits = AllowedTokens(jnp.array([1, 3, -1]))
      >>> state = digits.begin(jnp.array([0]), jnp.array([[5]]))
      >>> digits.steer(state, jnp.ones((1, 4))).tolist()
      [[-inf, 1.0, -inf, 1.0]]
    """

    tokens: jax.Array  # i32[A], or i32[M, A] of M variants

    @property
    def num_variants(self) -> int:
        """M, or one."""
        return count_variants(self.tokens, 1)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> jax.Array:
        """Return the variant of each text, i32[N]."""
        del prompts
        check_integers("AllowedTokens.tokens", self.tokens, "A | M A")
        return variants

    def steer(self, state: jax.Array, logits: jax.Array) -> jax.Array:
        """Forbid all others."""
        tokens = find_rows(jnp.asarray(self.tokens, jnp.int32), 1, state)
        mask = jnp.zeros(logits.shape, bool)
        mask = mask.at[find_columns(tokens, logits)].set(True, mode="drop")
        return jnp.where(mask, logits, -jnp.inf)


class _BanRows(NamedTuple):
    """What is known of N texts."""

    newest: jax.Array  # i32[N, C - 1]
    variants: jax.Array  # i32[N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BannedTexts(EndsNothing):
    """Lists of tokens that a text never has.

    The last token of a list is forbidden where those before it are the newest of the
    text, the end of the prompt counted; a list of one token is always forbidden. That
    is what transformers' `NoBadWordsLogitsProcessor` does where the text has at least
    as many tokens as the list. A tokenizer may spell the same words with other tokens,
    which are not banned: give each spelling.

    Args:
      texts: i32[F, C], -1 after each one's end; i32[M, F, C] for lists of its own for
        each of M variants.

    Raises:
      ValueError: when a text begins, if they are no integers or have other axes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import BannedTexts
      >>> banned = BannedTexts(jnp.array([[1, 2], [3, -1]]))
      >>> state = banned.begin(jnp.array([0]), jnp.array([[7, 1]]))
      >>> banned.steer(state, jnp.ones((1, 5))).tolist()
      [[1.0, 1.0, -inf, -inf, 1.0]]
    """

    texts: jax.Array  # i32[F, C], or i32[M, F, C] of M variants

    @property
    def num_variants(self) -> int:
        """M, or one."""
        return count_variants(self.texts, 2)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> _BanRows:
        """Return the newest tokens of each text, and its variant."""
        texts = check_integers("BannedTexts.texts", self.texts, "F C | M F C")
        return _BanRows(find_newest(prompts, texts.shape[-1] - 1), variants)

    def steer(self, state: _BanRows, logits: jax.Array) -> jax.Array:
        """Forbid what would complete one of them."""
        texts = align_right(jnp.asarray(self.texts, jnp.int32))
        texts = find_rows(texts, 2, state.variants)
        before, last = texts[:, :, :-1], texts[:, :, -1]
        is_there = (before < 0) | (before == state.newest[:, None])
        return forbid(logits, jnp.where(jnp.all(is_there, axis=2), last, -1))

    def advance(self, state: _BanRows, tokens: jax.Array) -> _BanRows:
        """Note the token."""
        return state._replace(newest=push(state.newest, tokens))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TokenBias(Unchanging):
    """Numbers that are added to the logits of some tokens, in every step.

    It is the `logit_bias` of OpenAI's interface
    (https://platform.openai.com/docs/api-reference/completions). There -100 should mean
    a ban; here it is a number like any other, and a token at -100 is still chosen where
    nothing else is allowed. Give -inf to forbid a token, and never inf. Numbers of a
    token that is named twice add up.

    Args:
      tokens: i32[E], -1 for none; i32[M, E] for tokens of its own for each of M
        variants.
      values: f32, shaped as `tokens`.

    Raises:
      ValueError: when a text begins, if they have other types or axes, or different
        shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import TokenBias
      >>> bias = TokenBias(jnp.array([1, 3]), jnp.array([0.5, -jnp.inf]))
      >>> bias.steer(bias.begin(jnp.array([0]), jnp.array([[5]])), jnp.ones((1, 4)))
      Array([[ 1. ,  1.5,  1. , -inf]], dtype=float32)
    """

    tokens: jax.Array  # i32[E], or i32[M, E] of M variants
    values: jax.Array  # f32[E], or f32[M, E]

    @property
    def num_variants(self) -> int:
        """M, or one."""
        return count_variants(self.tokens, 1)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> jax.Array:
        """Return the variant of each text, i32[N]."""
        del prompts
        tokens = check_integers("TokenBias.tokens", self.tokens, "E | M E")
        axes = " ".join(map(str, tokens.shape))
        values = jnp.asarray(self.values)
        expect(
            "TokenBias.values", values, axes, kind=jnp.number, why="shaped as tokens"
        )
        return variants

    def steer(self, state: jax.Array, logits: jax.Array) -> jax.Array:
        """Add the numbers."""
        tokens = jnp.asarray(self.tokens, jnp.int32)
        values = jnp.asarray(self.values, jnp.float32)
        if tokens.ndim == 1:
            # One row for all texts: XLA puts it where the logits are read.
            tokens, values = tokens[None], values[None]
        else:
            tokens, values = tokens[state], values[state]
        row = jnp.zeros((tokens.shape[0], logits.shape[1]), jnp.float32)
        row = row.at[find_columns(tokens, row)].add(values, mode="drop")
        return logits + row


class _LengthRows(NamedTuple):
    """What is known of N texts."""

    lacks: jax.Array  # i32[N], tokens before each may end
    variants: jax.Array  # i32[N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MinimumLength(EndsNothing):
    """No end token before a text has so many new tokens.

    End tokens that are given to the loop (`stop_tokens`) are not known here: name them
    again. Stop sequences are not forbidden.

    Args:
      end_tokens: i32[E], those that end a text, -1 for none; i32[M, E] for tokens of
        its own for each of M variants.
      min_new_tokens: i32[] or int, new tokens before an end token may come; i32[M] for
        a number of its own for each of M variants.

    Raises:
      ValueError: when a text begins, if they are no integers or have other axes, or
        different numbers of variants.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import MinimumLength
      >>> short = MinimumLength(jnp.array([2]), min_new_tokens=1)
      >>> state = short.begin(jnp.array([0]), jnp.array([[5, 6]]))
      >>> short.steer(state, jnp.ones((1, 4))).tolist()
      [[1.0, 1.0, -inf, 1.0]]
      >>> short.steer(short.advance(state, jnp.array([3])), jnp.ones((1, 4))).tolist()
      [[1.0, 1.0, 1.0, 1.0]]
    """

    end_tokens: jax.Array  # i32[E], or i32[M, E] of M variants
    min_new_tokens: jax.Array | int  # i32[], or i32[M] of M variants

    @property
    def num_variants(self) -> int:
        """M, or one."""
        counts = (
            count_variants(self.end_tokens, 1),
            count_variants(self.min_new_tokens, 0),
        )
        return max(counts)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> _LengthRows:
        """Return how many tokens each text lacks before it may end."""
        del prompts
        ends = check_integers("MinimumLength.end_tokens", self.end_tokens, "E | M E")
        least = check_integers(
            "MinimumLength.min_new_tokens", self.min_new_tokens, "| M"
        )
        if ends.ndim == 2 and least.ndim == 1 and len(ends) != len(least):
            raise UsageError(
                f"MinimumLength: end_tokens have {len(ends)} variants and "
                f"min_new_tokens {len(least)}"
            )
        return _LengthRows(find_rows(least, 0, variants), variants)

    def steer(self, state: _LengthRows, logits: jax.Array) -> jax.Array:
        """Forbid the end tokens while tokens lack."""
        ends = jnp.asarray(self.end_tokens, jnp.int32)
        # One row for all texts: XLA puts it where the logits are read.
        ends = ends[None] if ends.ndim == 1 else ends[state.variants]
        without = forbid(jnp.zeros((len(ends), logits.shape[1]), jnp.float32), ends)
        return jnp.where(state.lacks[:, None] > 0, logits + without, logits)

    def advance(self, state: _LengthRows, tokens: jax.Array) -> _LengthRows:
        """Count the token."""
        return state._replace(lacks=state.lacks - (tokens >= 0).astype(jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class NoRepeatedNgrams(EndsNothing):
    """No n-gram twice in a text, its prompt counted.

    A token is forbidden if the text has, anywhere, the tokens before it and it, in a
    row. The rows of the state are whole texts: P + `max_new_tokens` tokens. Of a text
    that has more than that the oldest are forgotten.

    A step compares every token of the text with the newest `size` - 1.

    Args:
      size: tokens of an n-gram; 1 forbids any token that the text has.
      max_new_tokens: as many as a text may get, in all calls that go on with it.

    Raises:
      ValueError: when a text begins, if one of them is less than 1 or no int.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import NoRepeatedNgrams
      >>> pairs = NoRepeatedNgrams(size=2, max_new_tokens=8)
      >>> state = pairs.begin(jnp.array([0]), jnp.array([[1, 3, 1, 2, 1]]))
      >>> pairs.steer(state, jnp.ones((1, 5))).tolist()
      [[1.0, 1.0, -inf, -inf, 1.0]]
    """

    # Tokens of an n-gram; static, as programs differ.
    size: int = dataclasses.field(metadata={"static": True})
    # Static, as the state's shape follows from it.
    max_new_tokens: int = dataclasses.field(metadata={"static": True})

    def begin(self, variants: jax.Array, prompts: jax.Array) -> jax.Array:
        """Return the newest tokens of each text, i32[N, T]."""
        del variants
        for name in ("size", "max_new_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(
                    f"NoRepeatedNgrams: {name} must be an int of 1 or more, got "
                    f"{value!r}"
                )
        most = prompts.shape[1] + self.max_new_tokens
        return find_newest(prompts, max(most, self.size))

    def steer(self, state: jax.Array, logits: jax.Array) -> jax.Array:
        """Forbid what would end an n-gram that the text has."""
        num_windows = state.shape[1] - self.size + 1
        # A window is an n-gram of the text if it lies behind the text's begin.
        is_again = state[:, :num_windows] >= 0
        for place in range(self.size - 1):
            of_window = state[:, place : place + num_windows]
            newest = state[:, num_windows + place]
            is_again &= of_window == newest[:, None]
        lasts = state[:, self.size - 1 :]
        return forbid(logits, jnp.where(is_again, lasts, -1))

    def advance(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
        """Add the token to the text."""
        return push(state, tokens)

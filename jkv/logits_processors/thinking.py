"""Bound on the length of reasoning, enforced by forcing the closing tag.

Budget forcing is from Muennighoff et al., arXiv 2501.19393 (section 3.1).

Symbols: N sequences, P longest prompt, A and C tokens of the tags, M variants, K rows.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.logits_processors.protocol import EndsNothing
from jkv.logits_processors.tables import (
    check_integers,
    count_variants,
    ends_with,
    find_newest,
    find_rows,
    push,
)
from jkv.status import UsageError


class _ThoughtRows(NamedTuple):
    """State of N sequences."""

    newest: jax.Array  # i32[N, max(A, C)]
    is_thinking: jax.Array  # bool[N]
    num_thoughts: jax.Array  # i32[N], tokens since the open tag, or 0
    budgets: jax.Array  # i32[N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ThinkingBudget(EndsNothing):
    """Limit on reasoning tokens, enforced by forcing the closing tag.

    Reasoning starts after an open tag, in the prompt or generated, and ends with a
    closing tag. Every token in between counts, including tokens of the prompt, of an
    incomplete closing tag, and of nested open tags. Once the budget is spent, the
    closing tag is forced token by token, completing one that the model has started. So
    reasoning has at most `budget` tokens and the closing tag. Each reasoning section
    has the full budget.

    Tags are matched as tokens: they are not found if the tokenizer merges them with
    adjacent text. Tags that are single special tokens are safe.

    Args:
      open_tag: i32[A].
      close_tag: i32[C].
      budget: i32[] or int, tokens of a reasoning section; i32[M] for M variants.

    Raises:
      ValueError: in `begin`, for other dtypes or axes, or an empty tag.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.logits_processors import ThinkingBudget
      >>> brief = ThinkingBudget(jnp.array([7]), jnp.array([8, 9]), budget=2)
      >>> state = brief.begin(jnp.array([0, 0]), jnp.array([[7, 1, 1], [7, 1, 8]]))
      >>> brief.forced(state).tolist()
      [8, 9]
    """

    open_tag: jax.Array  # i32[A]
    close_tag: jax.Array  # i32[C]
    budget: jax.Array | int  # i32[], or i32[M] with M variants

    @property
    def num_variants(self) -> int:
        """Number of variants, M, or 1."""
        return count_variants(self.budget, 0)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> _ThoughtRows:
        """Return the state after the prompts, which may end inside reasoning."""
        budget = check_integers("ThinkingBudget.budget", self.budget, "| M")
        opening, closing = self._tags()
        position = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None]
        closes = _find_tags(prompts, closing)
        closed_at = jnp.max(jnp.where(closes, position, -1), axis=1, keepdims=True)
        opens = _find_tags(prompts, opening) & (position > closed_at)
        is_thinking = jnp.any(opens, axis=1)
        lengths = jnp.sum(prompts >= 0, axis=1, dtype=jnp.int32)
        behind = lengths - 1 - jnp.argmax(opens, axis=1).astype(jnp.int32)
        return _ThoughtRows(
            newest=find_newest(prompts, max(opening.shape[0], closing.shape[0])),
            is_thinking=is_thinking,
            num_thoughts=jnp.where(is_thinking, behind, 0),
            budgets=find_rows(budget, 0, variants),
        )

    def process(self, state: _ThoughtRows, logits: jax.Array) -> jax.Array:
        """Mask all tokens but the closing tag's if the budget is spent."""
        forced = self.forced(state)[:, None]
        token = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
        return jnp.where((forced >= 0) & (token != forced), -jnp.inf, logits)

    def advance(self, state: _ThoughtRows, tokens: jax.Array) -> _ThoughtRows:
        """Append the token, match the tags, and count it."""
        opening, closing = self._tags()
        newest, is_new = push(state.newest, tokens), tokens >= 0
        was_thinking = state.is_thinking
        is_thinking = was_thinking | ends_with(newest, opening)
        is_thinking &= ~ends_with(newest, closing)
        is_thinking = jnp.where(is_new, is_thinking, was_thinking)
        more = (is_new & was_thinking).astype(jnp.int32)
        return state._replace(
            newest=newest,
            is_thinking=is_thinking,
            num_thoughts=jnp.where(is_thinking, state.num_thoughts + more, 0),
        )

    def forced(self, state: _ThoughtRows) -> jax.Array:
        """Return the next token of the closing tag if it is forced, else -1."""
        _, closing = self._tags()
        # Length of the longest prefix of the tag that ends the sequence.
        num_begun = jnp.zeros(state.budgets.shape, jnp.int32)
        for count in range(1, closing.shape[0]):
            is_begun = ends_with(state.newest, closing[:count])
            num_begun = jnp.where(is_begun, count, num_begun)
        is_spent = state.is_thinking & (state.num_thoughts >= state.budgets)
        return jnp.where(is_spent, closing[num_begun], -1)

    def _tags(self) -> tuple[jax.Array, jax.Array]:
        """Return the open tag and the closing tag."""
        names = ("open_tag", "close_tag")
        opening, closing = (
            check_integers(f"ThinkingBudget.{name}", getattr(self, name), n)
            for name, n in zip(names, "AC", strict=True)
        )
        if not (opening.size and closing.size):
            raise UsageError(
                f"open_tag and close_tag must have at least one token, got "
                f"{opening.size} and {closing.size}"
            )
        return opening, closing


def _find_tags(prompts: jax.Array, tag: jax.Array) -> jax.Array:
    """Return True where a tag ends in a prompt, bool[N, P]."""
    num_before, most = tag.shape[0] - 1, prompts.shape[1]
    padded = jnp.pad(prompts, ((0, 0), (num_before, 0)), constant_values=-1)
    is_end = jnp.ones(prompts.shape, bool)
    for place in range(tag.shape[0]):
        is_end &= padded[:, place : place + most] == tag[place]
    return is_end

"""A bound on how long a model thinks: then its closing tag is forced.

Budget forcing is of Muennighoff et al., arXiv 2501.19393 (section 3.1).

Symbols: N texts, P most prompt tokens, A and C tokens of the tags, M variants, K rows.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.status import UsageError
from jkv.steering.protocol import EndsNothing
from jkv.steering.tables import (
    check_integers,
    count_variants,
    ends_with,
    find_newest,
    find_rows,
    push,
)


class _ThoughtRows(NamedTuple):
    """What is known of N texts."""

    newest: jax.Array  # i32[N, max(A, C)]
    is_thinking: jax.Array  # bool[N]
    num_thoughts: jax.Array  # i32[N], tokens since the open tag, 0 outside of thought
    budgets: jax.Array  # i32[N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ThinkingBudget(EndsNothing):
    """At most so many tokens of thought, then the closing tag.

    Thought begins behind an open tag, be it in the prompt or written by the model, and
    ends with a closing tag. Every token between counts, those of the prompt and of a
    closing tag that is begun, too; an open tag inside of thought is thought. When the
    budget is spent, the tokens of the closing tag are the only ones allowed; if the
    model has begun the tag, those that lack. So a thought has at most `budget` tokens
    and the tag's. Each thought has the whole budget.

    The tags are tokens: a tokenizer that joins a tag with what stands beside it makes
    others, which are not found. Tags that are tokens of their own are safe.

    Args:
      open_tag: i32[A].
      close_tag: i32[C].
      budget: i32[] or int, tokens of a thought; i32[M] for a number of its own for each
        of M variants.

    Raises:
      ValueError: when a text begins, if they are no integers or have other axes, or a
        tag is empty.

    Example:
      >>> import jax.numpy as jnp
      >>> from jkv.steering import ThinkingBudget
      >>> brief = ThinkingBudget(jnp.array([7]), jnp.array([8, 9]), budget=2)
      >>> state = brief.begin(jnp.array([0, 0]), jnp.array([[7, 1, 1], [7, 1, 8]]))
      >>> brief.forced(state).tolist()
      [8, 9]
    """

    open_tag: jax.Array  # i32[A]
    close_tag: jax.Array  # i32[C]
    budget: jax.Array | int  # i32[], or i32[M] of M variants

    @property
    def num_variants(self) -> int:
        """M, or one."""
        return count_variants(self.budget, 0)

    def begin(self, variants: jax.Array, prompts: jax.Array) -> _ThoughtRows:
        """Find which prompts end in thought, and how many tokens of it they have."""
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

    def steer(self, state: _ThoughtRows, logits: jax.Array) -> jax.Array:
        """Allow nothing but the closing tag where the budget is spent."""
        forced = self.forced(state)[:, None]
        token = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
        return jnp.where((forced >= 0) & (token != forced), -jnp.inf, logits)

    def advance(self, state: _ThoughtRows, tokens: jax.Array) -> _ThoughtRows:
        """See whether the token completes a tag, and count it."""
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
        """Return the next token of the closing tag where it must come, else -1."""
        _, closing = self._tags()
        # The longest end of the text that begins the tag.
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
            raise UsageError("ThinkingBudget: a tag must have a token at least")
        return opening, closing


def _find_tags(prompts: jax.Array, tag: jax.Array) -> jax.Array:
    """Return with which tokens of prompts a tag ends, bool[N, P]."""
    num_before, most = tag.shape[0] - 1, prompts.shape[1]
    padded = jnp.pad(prompts, ((0, 0), (num_before, 0)), constant_values=-1)
    is_end = jnp.ones(prompts.shape, bool)
    for place in range(tag.shape[0]):
        is_end &= padded[:, place : place + most] == tag[place]
    return is_end

"""PromptLookup: draft tokens from earlier continuations of the newest tokens."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jkv.arguments import explains_class
from jkv.decoding.model.drafter import WithoutLayers, check_sizes, static
from jkv.metadata.requests import check_counts
from jkv.state import Cache

if TYPE_CHECKING:
    from jkv.decoding.speculation.draft_step import DraftStep

# Draft tokens of each sequence: eight rows with the token before them.
NUM_TOKENS = 7


@explains_class
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup(WithoutLayers):
    """Speculative decoding by prompt lookup: earlier continuations as draft tokens.

    The longest suffix, up to `max_ngram` tokens, that occurs earlier in the prompt or
    the completion is looked up, and the tokens after its latest occurrence are the
    draft tokens (Saxena, "Prompt Lookup Decoding", 2023). It needs no model, and pays
    for repetitive output: edited code, quoted documents, lists.

    Attributes:
      num_tokens: most draft tokens of a sequence in a step.
      max_ngram: longest suffix to look up.
      min_ngram: shortest suffix to look up.
      cost: time of a step with draft tokens, relative to a plain step. A step
        speculates only if the expected tokens are worth it.

    Raises:
      ValueError: for a number out of its range.

    Example:
      >>> from jkv import PromptLookup
      >>> PromptLookup(num_tokens=5).max_ngram
      3
    """

    num_tokens: int = static(NUM_TOKENS)
    max_ngram: int = static(3)
    min_ngram: int = static(2)
    cost: float = static(2.0)

    aux_layers = ()

    def __post_init__(self) -> None:
        check_sizes(self.num_tokens, self.cost)
        check_counts(min_ngram=self.min_ngram, max_ngram=self.max_ngram)
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"min_ngram and max_ngram of PromptLookup must satisfy "
                f"1 <= min_ngram <= max_ngram; got {self.min_ngram}, {self.max_ngram}"
            )

    def draft(
        self, cache: Cache, step: "DraftStep"
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Look up draft tokens in prompts and completions."""
        return cache, *find_draft_tokens(*step.tokens(), self)


def find_draft_tokens(
    # i32[W, L], prompts and completions, -1 past the end of each
    tokens: jax.Array,
    lengths: jax.Array,  # i32[W]
    options: PromptLookup,
) -> tuple[jax.Array, jax.Array]:
    """Look up draft tokens, i32[W, K]; return also their counts, i32[W]."""
    width = tokens.shape[1]
    column = jnp.arange(width, dtype=jnp.int32)[None]
    last = lengths[:, None] - 1
    agrees = jnp.ones(tokens.shape, bool)
    matched = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(options.max_ngram):
        # Tokens before a column, compared with the newest ones.
        moved = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :width]
        newest = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
        agrees &= (moved == newest) & (moved >= 0)
        matched += agrees.astype(jnp.int32)
    # The longest match wins, and of equal ones the latest.
    is_match = (matched >= options.min_ngram) & (column < last)
    best = jnp.max(jnp.where(is_match, matched * width + column, -1), axis=1)
    found = best >= 0
    start = jnp.where(found, best % width + 1, 0)
    # Past the end the draft tokens themselves follow: a repetition continues.
    period = jnp.maximum(lengths - start, 1)[:, None]
    ahead = jnp.arange(options.num_tokens, dtype=jnp.int32)[None]
    drafted = jnp.take_along_axis(tokens, start[:, None] + ahead % period, axis=1)
    return jnp.maximum(drafted, 0), jnp.where(found, options.num_tokens, 0)

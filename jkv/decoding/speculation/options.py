"""How tokens are guessed: looked up in the text, or drafted by a smaller model."""

import dataclasses
from typing import Any

import jax

from jkv.arguments import explains_class
from jkv.decoding.model.protocol import Model
from jkv.state import Cache
from jkv.status import UsageError

# Guesses for each sequence: with the token before them they make eight rows.
NUM_TOKENS = 7


def _static(default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


@explains_class
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup:
    """Guess that what followed the newest tokens before follows them again.

    The longest run of newest tokens, up to `max_ngram`, that occurs earlier in the
    prompt or in what was generated is looked up, its latest occurrence first, and what
    stands behind it there is guessed (Saxena, "Prompt Lookup Decoding", 2023). It costs
    no model, and pays where texts repeat: code that is edited, documents that are
    quoted, lists.

    Attributes:
      num_tokens: most tokens that are guessed for a sequence in a step.
      max_ngram: longest run of tokens that is looked up.
      min_ngram: shortest one.
      cost: time of a step with guesses, in steps without. A step guesses only where the
        tokens to be expected are worth it.

    Raises:
      ValueError: for a number out of its range.

    Example:
      >>> from jkv import PromptLookup
      >>> PromptLookup(num_tokens=5).max_ngram
      3
    """

    num_tokens: int = _static(NUM_TOKENS)
    max_ngram: int = _static(3)
    min_ngram: int = _static(2)
    cost: float = _static(2.0)

    def __post_init__(self) -> None:
        check_sizes(self.num_tokens, self.cost)
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"PromptLookup looks up runs of min_ngram to max_ngram tokens, with "
                f"1 <= min_ngram <= max_ngram; got {self.min_ngram}, {self.max_ngram}"
            )


@explains_class
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DraftModel:
    """Let a smaller model, with a cache of its own, draft the next tokens.

    It drafts them by the sampling that the text has; each is accepted with probability
    min(1, p / q), where p is the model's and q the draft's, and what stands in for one
    that is not is drawn from max(0, p - q), normalised (Leviathan et al., "Fast
    Inference from Transformers via Speculative Decoding", 2023; Chen et al.,
    "Accelerating Large Language Model Decoding with Speculative Sampling", 2023). So
    tokens have the distribution that they have without drafts, whatever the draft model
    is; greedy texts are the same. With a temperature, which tokens are drawn depends on
    where drafts were checked, and that on the texts beside: a text drawn with the same
    seed alone may be another of the same distribution.

    Attributes:
      model: a `Model` with the same vocabulary; static.
      params: its weights.
      cache: its cache, with a row for each of the sequences that run at one time, and
        blocks for their whole texts; a sequence that finds none is not drafted for. It
        is used inside the call, and not changed for the caller.
      num_tokens: tokens that are drafted for a sequence in a step; static.
      cost: time of a step with drafts and of drafting them, in steps without; static.

    Raises:
      ValueError: for a number out of its range.

    Example:
      >>> import jax, jkv
      >>> from jkv.decoding import DraftModel
      >>> def count_on(params, tokens, cache, batch, *, all_rows=False):
      ...     logits = 9 * jax.nn.one_hot(tokens + 1, 100)
      ...     return (logits if all_rows else logits[batch.last_rows]), cache
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16)
      >>> draft = DraftModel(model=count_on, params=None, cache=jkv.init(config),
      ...     num_tokens=3)
      >>> cache, result = jkv.generate(count_on, None, jkv.init(config), [[5, 6, 7]],
      ...     max_new_tokens=6, row_counts=(8,), speculate=draft)
      >>> result.tokens.tolist(), int(result.statistics.accepted_tokens)
      ([[8, 9, 10, 11, 12, 13]], 3)
    """

    model: Model = dataclasses.field(metadata={"static": True})
    params: Any
    cache: Cache
    num_tokens: int = _static(4)
    cost: float = _static(2.0)

    def __post_init__(self) -> None:
        check_sizes(self.num_tokens, self.cost)


def check_speculation(options: object) -> None:
    if not isinstance(options, PromptLookup | DraftModel):
        raise UsageError(
            f"speculate must be a PromptLookup or a DraftModel, as in "
            f"PromptLookup(num_tokens=7), or None; got {options!r}"
        )


def check_sizes(num_tokens: int, cost: float) -> None:
    """Refuse a number of guesses, or a cost, with which nothing would be guessed."""
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise ValueError(f"num_tokens must be an int of at least 1, got {num_tokens!r}")
    if not 1 <= cost < num_tokens + 1:
        raise ValueError(
            f"cost must be from 1 to below num_tokens + 1, the most tokens of a step, "
            f"got {cost} for {num_tokens} tokens"
        )

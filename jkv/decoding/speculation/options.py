"""Options of speculative decoding: prompt lookup, or a draft model."""

import dataclasses
from typing import Any

import jax

from jkv.arguments import explains_class
from jkv.decoding.model.steps import Model
from jkv.state import Cache
from jkv.status import UsageError

# Draft tokens of each sequence: eight rows with the token before them.
NUM_TOKENS = 7


def _static(default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


@explains_class
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup:
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

    num_tokens: int = _static(NUM_TOKENS)
    max_ngram: int = _static(3)
    min_ngram: int = _static(2)
    cost: float = _static(2.0)

    def __post_init__(self) -> None:
        check_sizes(self.num_tokens, self.cost)
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"min_ngram and max_ngram of PromptLookup must satisfy "
                f"1 <= min_ngram <= max_ngram; got {self.min_ngram}, {self.max_ngram}"
            )


@explains_class
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DraftModel:
    """Speculative decoding with a smaller draft model and its own cache.

    Draft tokens are drawn with the sampling options of the sequence. Each is accepted
    with probability min(1, p / q), where p is the model's and q the draft model's; a
    rejected one is replaced by a draw from max(0, p - q), normalised (Leviathan et al.,
    "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et al.,
    "Accelerating Large Language Model Decoding with Speculative Sampling", 2023). The
    distribution of completions is independent of the draft model, and greedy
    completions are equal. With a temperature the drawn tokens depend on the positions
    of verification and so on the rest of the batch: the same seed may give another
    completion of the same distribution.

    Attributes:
      model: a `Model` with the same vocabulary; static.
      params: its weights.
      cache: its cache, with a row for each running sequence, and blocks for whole
        sequences; a sequence without blocks gets no draft tokens. The caller's cache is
        unchanged.
      num_tokens: draft tokens of a sequence in a step; static.
      cost: time of a step with drafting, relative to a plain step; static.

    Raises:
      ValueError: for a number out of its range.

    Example:
      >>> import jax, jkv
      >>> from jkv.decoding import DraftModel
      >>> def count_on(params, tokens, cache, batch, *, all_rows=False):
      ...     logits = 9 * jax.nn.one_hot(tokens + 1, 100)
      ...     return (logits if all_rows else logits[batch.last_rows]), cache
      >>> config = jkv.CacheConfig.toy()
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
            f"speculate must be a PromptLookup or a DraftModel, such as "
            f"PromptLookup(num_tokens=7), or None; got {options!r}"
        )


def check_sizes(num_tokens: int, cost: float) -> None:
    """Refuse a number of draft tokens or a cost that never pays."""
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise ValueError(f"num_tokens must be an int of at least 1, got {num_tokens!r}")
    if not 1 <= cost < num_tokens + 1:
        raise ValueError(
            f"cost must be from 1 to below num_tokens + 1, the most tokens of a step, "
            f"got {cost} for {num_tokens} tokens"
        )

"""How tokens are guessed: looked up in the text, or drafted by a smaller model."""

import dataclasses

# Guesses for each sequence: with the token before them they make eight rows.
NUM_TOKENS = 7


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
      >>> from jkv.decoding import PromptLookup
      >>> PromptLookup(num_tokens=5).max_ngram
      3
    """

    num_tokens: int = NUM_TOKENS
    max_ngram: int = 3
    min_ngram: int = 2
    cost: float = 1.5

    def __post_init__(self) -> None:
        check_sizes(self.num_tokens, self.cost)
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"PromptLookup looks up runs of min_ngram to max_ngram tokens, with "
                f"1 <= min_ngram <= max_ngram; got {self.min_ngram}, {self.max_ngram}"
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

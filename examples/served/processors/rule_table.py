"""Fixed-size table of per-request rules, updated without recompilation.

Rules restrict tokens: biases, penalties, minimum length, banned sequences and allowed
tokens.
"""

from typing import Any, NamedTuple

import numpy as np

from jkv.logits_processors import (
    AllowedTokens,
    BannedSequences,
    LogitsProcessor,
    MinimumLength,
    TokenBias,
    chain,
    renumber,
)

from .penalties import CountPenalties

MOST_BIASES = 256
MOST_BAD_WORDS = 32
MOST_TOKENS_OF_A_WORD = 8
MOST_ALLOWED = 1024


class Rules(NamedTuple):
    """Rules for all completions of a request."""

    biases: dict[int, float]  # by token id
    min_tokens: int
    end_tokens: list[int]  # not allowed before `min_tokens`
    banned: list[list[int]]  # token ids
    allowed: list[int] | None  # token ids; None for all
    presence: float = 0.0  # penalties
    frequency: float = 0.0


class RuleTable:
    """Rows of rules, as host arrays.

    Attributes:
        num_rows: maximum number of requests with rules.
    """

    def __init__(
        self, num_rows: int, num_stop_tokens: int, vocabulary_size: int
    ) -> None:
        """Create an empty table.

        Args:
            num_rows: maximum number of requests with rules.
            num_stop_tokens: maximum per request.
            vocabulary_size: number of tokens.
        """

        self.num_rows = num_rows

        def none(*shape: int) -> np.ndarray[Any, np.dtype[np.int32]]:
            return np.full((num_rows, *shape), -1, np.int32)

        self._biased = none(MOST_BIASES)
        self._biases = np.zeros((num_rows, MOST_BIASES), np.float32)
        self._ends = none(num_stop_tokens)
        self._least = np.zeros(num_rows, np.int32)
        self._banned = none(2 * MOST_BAD_WORDS, MOST_TOKENS_OF_A_WORD)
        self._allowed = none(MOST_ALLOWED)
        self._has_allowed = none()  # the row's index; -1 if all are allowed
        self._presence = np.zeros(num_rows, np.float32)
        self._frequency = np.zeros(num_rows, np.float32)
        self._vocabulary_size = vocabulary_size

    def put(self, row: int, rules: Rules) -> None:
        """Write the rules of a request to a row."""
        biased = list(rules.biases.items())
        self._biased[row] = _pad([token for token, _ in biased], MOST_BIASES)
        self._biases[row, : len(biased)] = [bias for _, bias in biased]
        self._ends[row] = _pad(rules.end_tokens, self._ends.shape[1])
        self._least[row] = rules.min_tokens
        self._banned[row] = -1
        for place, tokens in enumerate(rules.banned):
            self._banned[row, place] = _pad(tokens, MOST_TOKENS_OF_A_WORD)
        self._allowed[row] = _pad(rules.allowed or [], MOST_ALLOWED)
        self._has_allowed[row] = -1 if rules.allowed is None else row
        self._presence[row], self._frequency[row] = rules.presence, rules.frequency

    @property
    def logits_processor(self) -> LogitsProcessor:
        """Logits processor of the current rows, one variant per row."""
        copy = np.copy  # JAX may alias host arrays, which `put` changes
        return chain(
            TokenBias(copy(self._biased), copy(self._biases)),
            CountPenalties(
                copy(self._presence), copy(self._frequency), self._vocabulary_size
            ),
            renumber(AllowedTokens(copy(self._allowed)), copy(self._has_allowed)),
            BannedSequences(copy(self._banned)),
            MinimumLength(copy(self._ends), copy(self._least)),
        )


def _pad(tokens: list[int], width: int) -> list[int]:
    return [*tokens, *[-1] * (width - len(tokens))]

"""What the programs of the device are compiled for, beside model and cache.

Symbols: Q prompts, N sequences of the generation, K lanes, S steps of a window at most,
U new tokens of a sequence in one.
"""

from typing import NamedTuple

from jkv.decoding.model.exact import Exact, ExactShape
from jkv.decoding.model.rows import spread_row_counts
from jkv.decoding.speculation.options import DraftModel, PromptLookup
from jkv.metadata.requests import check_counts, check_static
from jkv.serving.request.limits import StopSizes

# Prompts that one call of `exchange` takes to the device.
NUM_LANES = 16


class DraftSizes(NamedTuple):
    """What programs are compiled for of a `DraftModel`, beside model and arrays."""

    num_tokens: int
    cost: float


class EngineSizes(NamedTuple):
    """Everything that the programs are compiled for, beside model and cache."""

    num_prompts: int  # Q
    num_samples: int  # sequences of a prompt
    max_prompt_tokens: int
    max_new_tokens: int
    max_running: int
    row_counts: tuple[int, ...] | None  # None where `exact` says
    exact: Exact | None
    num_steps: int  # S
    num_lanes: int  # K, prompts that one call of `exchange` takes
    stops: StopSizes
    guesses: PromptLookup | DraftSizes | None

    @property
    def num_sequences(self) -> int:
        """Sequences of the generation, N."""
        return self.num_prompts * self.num_samples

    @property
    def max_window_tokens(self) -> int:
        """Most new tokens of a sequence in a window, U."""
        guesses = 0 if self.guesses is None else self.guesses.num_tokens
        return min(self.num_steps * (1 + guesses), self.max_new_tokens)


def find_sizes(
    *,
    max_running: int,
    num_ahead: int | None,
    max_samples: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    num_steps: int,
    chunk_size: int,
    row_counts: tuple[int, ...] | None,
    exact: ExactShape,
    stop_sizes: StopSizes,
    speculate: PromptLookup | DraftModel | None,
) -> EngineSizes:
    """Return the sizes of an engine; the arguments are those of `Engine`.

    Raises:
      ValueError: for sizes that cannot be.
    """
    check_counts(
        max_running=max_running,
        max_samples=max_samples,
        num_steps=num_steps,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        chunk_size=chunk_size,
    )
    ahead = max_running if num_ahead is None else num_ahead
    check_static("num_ahead", ahead, 0)
    num_prompts = max_running + ahead
    shape = Exact.of(exact)
    if shape is not None:
        shape.check_alone(row_counts, chunk_size)
        shape.check_fits("max_running", max_running)
    elif row_counts is None:
        most_rows = min(chunk_size, num_prompts * max_prompt_tokens)
        row_counts = spread_row_counts(max_running, most_rows)
    return EngineSizes(
        num_prompts=num_prompts,
        num_samples=max_samples,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_running=max_running,
        row_counts=row_counts,
        exact=shape,
        num_steps=num_steps,
        num_lanes=min(NUM_LANES, num_prompts),
        stops=stop_sizes,
        guesses=(
            DraftSizes(speculate.num_tokens, speculate.cost)
            if isinstance(speculate, DraftModel)
            else speculate
        ),
    )

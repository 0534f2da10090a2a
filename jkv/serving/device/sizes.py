"""Static sizes of the engine's programs, beside the model and the cache.

Symbols: Q prompts, N sequences of the generation, K lanes, S most steps of a window, U
most new tokens of a sequence in a window.
"""

import dataclasses
from typing import NamedTuple

from jkv.decoding.model.protocol import Model
from jkv.decoding.model.runner import spread_row_counts
from jkv.decoding.model.steps import GenerationConfig
from jkv.decoding.speculation.options import DraftModel, PromptLookup
from jkv.metadata.requests import check_counts, check_static
from jkv.serving.request.limits import StopSizes

# Number of prompts per call of `exchange`.
NUM_LANES = 16


@dataclasses.dataclass(frozen=True)
class DraftSizes:
    """Static options of a `DraftModel`, without its arrays."""

    model: Model = dataclasses.field(repr=False)  # its repr may differ between runs
    num_tokens: int
    cost: float


class EngineSizes(NamedTuple):
    """Static options of the programs, beside the model and the cache."""

    num_prompts: int  # Q
    max_prompt_tokens: int
    config: GenerationConfig
    num_steps: int  # S
    num_lanes: int  # K, prompts per call of `exchange`
    stops: StopSizes
    guesses: PromptLookup | DraftSizes | None
    max_span: int  # tokens of a span; 0: causal prompts only
    cacheable_spans: bool

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the generation, N."""
        return self.num_prompts * self.config.num_samples

    @property
    def max_running(self) -> int:
        assert self.config.max_running is not None
        return self.config.max_running

    @property
    def max_rows(self) -> int:
        """Rows of the largest step."""
        exact, row_counts = self.config.exact_shape, self.config.row_counts
        if exact is not None:
            return exact.num_rows
        assert row_counts is not None, "find_sizes sets it"
        return row_counts[-1]

    @property
    def max_window_tokens(self) -> int:
        """Largest number of new tokens of a sequence in a window, U."""
        guesses = 0 if self.guesses is None else self.guesses.num_tokens
        return min(self.num_steps * (1 + guesses), self.config.max_new_tokens)


def find_sizes(
    config: GenerationConfig,
    *,
    num_ahead: int | None,
    max_prompt_tokens: int,
    num_steps: int,
    stop_sizes: StopSizes,
    speculate: PromptLookup | DraftModel | None,
    max_span: int,
    cacheable_spans: bool,
) -> EngineSizes:
    """Return the sizes of an engine from the arguments of `Engine`."""
    running = config.max_running
    assert running is not None, "Engine requires max_running"
    check_counts(
        max_running=running, num_steps=num_steps, max_prompt_tokens=max_prompt_tokens
    )
    ahead = running if num_ahead is None else num_ahead
    check_static("num_ahead", ahead, 0)
    check_static("max_span", max_span, 0)
    num_prompts = running + ahead
    if (exact := config.exact_shape) is not None:
        exact.check_alone(config.row_counts, config.chunk_size)
        exact.check_fits("max_running", running)
    elif config.row_counts is None:
        most_rows = min(config.chunk_size, num_prompts * max_prompt_tokens)
        counts = spread_row_counts(running, most_rows)
        config = dataclasses.replace(config, row_counts=counts)
    return EngineSizes(
        num_prompts=num_prompts,
        max_prompt_tokens=max_prompt_tokens,
        config=config,
        num_steps=num_steps,
        num_lanes=min(NUM_LANES, num_prompts),
        stops=stop_sizes,
        guesses=(
            DraftSizes(speculate.model, speculate.num_tokens, speculate.cost)
            if isinstance(speculate, DraftModel)
            else speculate
        ),
        max_span=max_span,
        cacheable_spans=cacheable_spans,
    )

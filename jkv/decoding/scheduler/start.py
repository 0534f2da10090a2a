"""A generation begins: sizes are checked, and all sequences are put in the queue.

Symbols: N sequences, W places.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jkv.decoding.model.exact import Exact
from jkv.decoding.model.runner import Runner
from jkv.decoding.sampling.stopping import Bounds, judge_prompts
from jkv.decoding.scheduler.places import Places
from jkv.decoding.scheduler.queue import make_queue
from jkv.decoding.scheduler.samples import Holder
from jkv.decoding.scheduler.state import GenerationState
from jkv.decoding.steering.rows import begin_rows
from jkv.decoding.texts.blocks import count_free_blocks, find_block_size
from jkv.decoding.texts.prompts import Prompts
from jkv.decoding.texts.results import FinishReason, Generation
from jkv.decoding.texts.stops import Stops
from jkv.metadata.requests import check_counts
from jkv.state import Cache
from jkv.status import UsageError
from jkv.steering import Steering


class Sizes(NamedTuple):
    """Static numbers of a generation, as the caller says."""

    max_new_tokens: int
    num_samples: int
    max_running: int | None
    chunk_size: int
    row_counts: tuple[int, ...] | None
    exact: Exact | None = None

    def resolve(
        self, num_sequences: int, most_rows: int
    ) -> tuple[int, tuple[int, ...]]:
        """Return the places, W, and the rows that a step may have.

        Args:
          num_sequences: N.
          most_rows: rows that all prompts have together.
        """
        running = num_sequences if self.max_running is None else self.max_running
        check_counts(max_running=running, chunk_size=self.chunk_size)
        if self.exact is not None:
            self.exact.check_alone(self.row_counts, self.chunk_size)
            self.exact.check_fits("max_running", self.max_running or 1)
            return self.exact.num_requests, (self.exact.num_rows,)
        num_places = min(running, num_sequences)
        if self.row_counts is None:
            chunk = min(self.chunk_size, most_rows)
            return num_places, tuple(sorted({num_places, max(num_places, chunk)}))
        if not isinstance(self.row_counts, list | tuple):
            raise UsageError(
                f"row_counts must be a tuple of ints, as ({running},) for steps of so "
                f"many rows, got {self.row_counts!r}"
            )
        counts = tuple(self.row_counts)
        for count in counts:
            check_counts(row_counts=count)
        if list(counts) != sorted(set(counts)) or not counts or counts[-1] < running:
            raise ValueError(
                f"row_counts must ascend, and the last be at least max_running, as a "
                f"step has a row for each sequence that runs; got {counts} for "
                f"{running}"
            )
        return num_places, counts

    def limit_running(self, num_places: int) -> int:
        """Return how many sequences run at one time, of so many places."""
        return num_places if self.max_running is None else self.max_running


def begin_generation(
    runner: Runner,
    cache: Cache,
    prompts: Prompts,
    stops: Stops,
    sizes: Sizes,
    steering: Steering | None,
) -> GenerationState:
    """Begin with everything in the queue."""
    max_new_tokens, num_samples = sizes.max_new_tokens, sizes.num_samples
    check_counts(num_samples=num_samples)
    num_sequences = prompts.lengths.shape[0] * num_samples
    num_places, row_counts = sizes.resolve(num_sequences, prompts.tokens.size)
    if sizes.exact is not None:
        sizes.exact.check_cache(cache)
    num_blocks = count_free_blocks(cache)
    size = find_block_size(cache, row_counts)
    bounds = Bounds(cache.max_context_length, size, num_blocks)
    vocabulary = runner.count_vocabulary(cache, num_places)
    reasons = judge_prompts(prompts, bounds, vocabulary, steering)
    num_rows = cache.metadata.sequences.free_rows.count
    has_no_row = (reasons == FinishReason.RUNNING) & (num_rows == 0)
    reasons = jnp.where(has_no_row, jnp.int32(FinishReason.OUT_OF_SEQUENCES), reasons)
    reasons = jnp.repeat(reasons, num_samples)
    has_snapshots = cache.metadata.index.snapshot_every is not None
    return GenerationState(
        result=Generation.empty(
            reasons, max_new_tokens, begin_rows(steering, prompts, num_samples)
        ),
        prompts=prompts,
        stops=stops,
        places=Places.empty(num_places),
        queue=make_queue(reasons == FinishReason.RUNNING),
        holder=Holder.none(),
        seen=jnp.zeros((num_places, vocabulary), bool),
        num_blocks=num_blocks,
        most_running=jnp.minimum(
            num_rows, min(num_places, sizes.limit_running(num_places))
        ),
        seating_needs=tuple(jnp.zeros((), jnp.int32) for _ in num_blocks),
        speculation=None,
        partings=jnp.zeros((num_places,), jnp.int32) if has_snapshots else None,
        row_counts=row_counts,
        exact=sizes.exact,
    )

"""A generation begins: arguments are checked, and everything is put in the queue.

Symbols: Q prompts, N sequences, W places, V tokens in the vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.ending import Bounds, Stops, judge_prompts
from jkv.decoding.model import Model, call_model
from jkv.decoding.options import check_counts
from jkv.decoding.progress import (
    GenerationState,
    count_free_blocks,
    find_block_size,
)
from jkv.decoding.prompts import Prompts
from jkv.decoding.results import FinishReason, Generation
from jkv.decoding.scheduling.groups import Holder
from jkv.decoding.scheduling.places import Places
from jkv.decoding.scheduling.seating import make_queue
from jkv.metadata.requests import Integers, Texts
from jkv.state import NO_SEQUENCE, Cache
from jkv.verbs.appending import append


class Concurrency(NamedTuple):
    """How much runs at one time, as the caller says."""

    max_running: int | None
    chunk_size: int
    row_counts: tuple[int, ...] | None

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
        num_places = min(running, num_sequences)
        if self.row_counts is None:
            chunk = min(self.chunk_size, most_rows)
            return num_places, tuple(sorted({num_places, max(num_places, chunk)}))
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


def begin_generation(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    stop_tokens: Integers,
    stop_sequences: Texts | None,
    num_samples: int,
    sizes: Concurrency,
) -> GenerationState:
    """Begin with everything in the queue."""
    check_counts(max_new_tokens=max_new_tokens, num_samples=num_samples)
    stops = Stops.of(stop_tokens, stop_sequences, prompts.lengths.shape[0])
    num_sequences = prompts.lengths.shape[0] * num_samples
    num_places, row_counts = sizes.resolve(num_sequences, prompts.tokens.size)
    num_blocks = count_free_blocks(cache)
    size = find_block_size(cache, row_counts)
    bounds = Bounds(cache.max_context_length, size, num_blocks)
    reasons = judge_prompts(prompts, bounds)
    num_rows = cache.metadata.sequences.free_rows.count
    has_no_row = (reasons == FinishReason.RUNNING) & (num_rows == 0)
    reasons = jnp.where(has_no_row, jnp.int32(FinishReason.OUT_OF_SEQUENCES), reasons)
    reasons = jnp.repeat(reasons, num_samples)
    vocabulary = find_vocabulary(model, params, cache, num_places)
    return GenerationState(
        result=Generation.empty(reasons, max_new_tokens),
        prompts=prompts,
        stops=stops,
        places=Places.empty(num_places),
        queue=make_queue(reasons == FinishReason.RUNNING),
        holder=Holder.none(),
        seen=jnp.zeros((num_places, vocabulary), bool),
        num_blocks=num_blocks,
        most_running=jnp.minimum(num_rows, num_places),
        seating_needs=tuple(jnp.zeros((), jnp.int32) for _ in num_blocks),
        speculation=None,
        row_counts=row_counts,
    )


def find_vocabulary(model: Model, params: Any, cache: Cache, num_places: int) -> int:
    """Return the number of tokens there are; the model's own shapes tell it."""

    def probe(cache: Cache) -> jax.Array:
        nobody = jnp.full((num_places,), NO_SEQUENCE, jnp.int32)
        # A row more than requests: logits of rows are not those of requests.
        num_rows = num_places + 1
        tokens = jnp.zeros((num_rows,), jnp.int32)
        none = jnp.zeros_like(nobody)
        cache, batch = append(cache, nobody, none, capacity=num_rows, tokens=tokens)
        logits, _ = call_model(model, params, tokens, cache, batch)
        return logits

    return int(jax.eval_shape(probe, cache).shape[1])

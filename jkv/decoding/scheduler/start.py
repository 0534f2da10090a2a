"""A generation begins: sizes are checked, and all sequences are put in the queue.

Symbols: N sequences, W places.
"""

import jax.numpy as jnp

from jkv.decoding.arguments.asked import Asked
from jkv.decoding.model.runner import Runner
from jkv.decoding.sampling.stopping import Bounds, judge_prompts
from jkv.decoding.scheduler.places import Places
from jkv.decoding.scheduler.queue import make_queue
from jkv.decoding.scheduler.samples import Holder
from jkv.decoding.scheduler.state import GenerationState
from jkv.decoding.speculation.loop import begin_speculation
from jkv.decoding.steering.rows import begin_rows
from jkv.decoding.texts.blocks import count_free_blocks, find_block_size
from jkv.decoding.texts.results import FinishReason, Generation
from jkv.state import Cache


def begin_generation(runner: Runner, cache: Cache, asked: Asked) -> GenerationState:
    """Begin with everything in the queue."""
    prompts, stops, steps, how = asked
    num_samples, exact = steps.num_samples, steps.exact_shape
    num_sequences = prompts.lengths.shape[0] * num_samples
    num_places, row_counts = steps.resolve(num_sequences, prompts.tokens.size)
    if exact is not None:
        exact.check_cache(cache)
    num_blocks = count_free_blocks(cache)
    size = find_block_size(cache, row_counts)
    bounds = Bounds(cache.max_context_length, size, num_blocks)
    vocabulary = runner.count_vocabulary(cache, num_places)
    reasons = judge_prompts(prompts, bounds, vocabulary, how.steering)
    num_rows = cache.metadata.sequences.free_rows.count
    has_no_row = (reasons == FinishReason.RUNNING) & (num_rows == 0)
    reasons = jnp.where(has_no_row, jnp.int32(FinishReason.OUT_OF_SEQUENCES), reasons)
    reasons = jnp.repeat(reasons, num_samples)
    has_snapshots = cache.metadata.index.snapshot_every is not None
    steered = begin_rows(how.steering, prompts, num_samples)
    state = GenerationState(
        result=Generation.empty(reasons, steps.max_new_tokens, steered),
        prompts=prompts,
        stops=stops,
        places=Places.empty(num_places),
        queue=make_queue(reasons == FinishReason.RUNNING),
        holder=Holder.none(),
        seen=jnp.zeros((num_places, vocabulary), bool),
        num_blocks=num_blocks,
        most_running=jnp.minimum(
            num_rows, min(num_places, steps.max_running or num_places)
        ),
        seating_needs=tuple(jnp.zeros((), jnp.int32) for _ in num_blocks),
        speculation=None,
        partings=jnp.zeros((num_places,), jnp.int32) if has_snapshots else None,
        row_counts=row_counts,
        exact=exact,
    )
    return begin_speculation(state, how.speculate)

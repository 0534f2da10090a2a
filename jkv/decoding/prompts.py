"""Prompts on their way into the cache: opened, appended in chunks, forked into samples.

They are served first come, first served, and wait for nothing: the first that does not
fit beside those before it ends at once.

Symbols: B prompts, P most prompt tokens, R rows of a chunk, V tokens in the vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.decoding.ending import add_reasons, free_ended, keep_first
from jkv.decoding.model import Model, call_model
from jkv.decoding.results import FinishReason, Statistics
from jkv.decoding.step import count_step
from jkv.metadata.requests import Integers, Texts, as_prompts, broadcast
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.status import Status
from jkv.verbs.allocation import allocate
from jkv.verbs.appending import append
from jkv.verbs.forking import fork
from jkv.verbs.prefixes import commit


class Prompts(NamedTuple):
    """What is to be put in the cache."""

    tokens: jax.Array  # i32[B, P]
    lengths: jax.Array  # i32[B]

    @classmethod
    def of(cls, prompts: Texts) -> "Prompts":
        """Take the tokens before each row's first negative entry."""
        tokens = as_prompts(prompts, "prompts")
        if tokens.shape[0] == 0:
            raise ValueError("prompts is empty; give at least one prompt")
        is_token = (tokens >= 0).astype(jnp.int32)
        is_token = jnp.cumprod(is_token, axis=1, dtype=jnp.int32)
        return cls(tokens, jnp.sum(is_token, axis=1, dtype=jnp.int32))


class Progress(NamedTuple):
    """How far the prompts are."""

    seq_ids: jax.Array  # i32[B], -1 where a prompt has ended
    reasons: jax.Array  # i32[B], `FinishReason`
    num_done: jax.Array  # i32[B], tokens of each prompt in the cache
    statistics: Statistics

    def count_left(self, prompts: Prompts) -> jax.Array:
        """Return the tokens of each prompt still to be appended, i32[B]."""
        is_open = self.seq_ids >= 0
        return jnp.where(is_open, prompts.lengths - self.num_done, 0)


def fill_limits(
    limits: Integers | None, num_prompts: int, max_new_tokens: int
) -> jax.Array:
    """Return the most new tokens of each prompt's sequences, i32[B]."""
    limits = max_new_tokens if limits is None else limits
    if np.ndim(limits) == 0:
        (counts,) = broadcast(num_prompts, limits=limits)
    else:
        (counts,) = broadcast(limits=limits)
    if counts.shape != (num_prompts,):
        raise ValueError(
            f"limits must be i32[{num_prompts}], one for each prompt, got "
            f"i32{list(counts.shape)}"
        )
    return jnp.minimum(counts, max_new_tokens)


def open_prompts(
    cache: Cache, prompts: Prompts, limits: jax.Array, salts: Integers
) -> tuple[Cache, Progress]:
    """Open a sequence for each prompt that can begin, with what the index has of it.

    Args:
      cache: the cache.
      prompts: B of them.
      limits: i32[B], new tokens that each may have.
      salts: i32[B] or int, domains of the prefix index.
    """
    lengths = prompts.lengths
    reasons = jnp.full(lengths.shape, FinishReason.RUNNING, jnp.int32)
    for reason, applies in (
        (FinishReason.CONTEXT_FULL, lengths > cache.max_context_length),
        (FinishReason.LENGTH, limits <= 0),
        (FinishReason.EMPTY_PROMPT, lengths == 0),
    ):
        reasons = jnp.where(applies, jnp.int32(reason), reasons)
    begins = reasons == FinishReason.RUNNING
    no_tokens = jnp.where(begins, 0, NO_SEQUENCE)
    cache, opened = allocate(cache, no_tokens, tokens=prompts.tokens, salts=salts)
    nothing = jnp.int32(0)
    num_cached = jnp.sum(opened.num_cached, dtype=jnp.int32)
    return cache, Progress(
        seq_ids=opened.seq_ids,
        reasons=add_reasons(reasons, opened.status),
        num_done=opened.num_cached,
        statistics=Statistics(nothing, nothing, nothing, num_cached),
    )


def run_prompts(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: Prompts,
    progress: Progress,
    num_rows: int,
) -> tuple[Cache, Progress, jax.Array]:
    """Append the prompts, `num_rows` tokens at a time.

    Returns:
      The cache, the progress, and f32[B, V], the logits after each prompt's last token.
    """
    Carry = tuple[Cache, Progress, jax.Array]

    def goes_on(carry: Carry) -> jax.Array:
        return jnp.any(carry[1].count_left(prompts) > 0)

    def step(carry: Carry) -> Carry:
        cache, progress, logits = carry
        tokens, cache, batch = _append_chunk(cache, prompts, progress, num_rows)
        found, cache = call_model(model, params, tokens, cache, batch)
        cache = commit(cache, batch)
        num_done = progress.num_done + batch.query_lengths
        is_done = (num_done == prompts.lengths) & (batch.query_lengths > 0)
        logits = jnp.where(is_done[:, None], found.astype(jnp.float32), logits)
        cache, progress = _end_step(cache, progress, batch, num_done)
        return cache, progress, logits

    # The model's own shapes say how large the vocabulary is. It is asked with another
    # number of rows than of prompts: then logits of all rows cannot look like theirs.
    num_prompts = prompts.lengths.shape[0]
    num_asked = num_rows + (num_rows == num_prompts)
    shape, _ = jax.eval_shape(
        lambda cache, progress: call_model(
            model, params, *_append_chunk(cache, prompts, progress, num_asked)
        ),
        cache,
        progress,
    )
    logits = jnp.zeros(shape.shape, jnp.float32)
    return lax.while_loop(goes_on, step, (cache, progress, logits))


def fork_samples(
    cache: Cache, progress: Progress, num_samples: int
) -> tuple[Cache, Progress]:
    """Open `num_samples - 1` more sequences on each prompt, which share its blocks."""
    if num_samples == 1:
        return cache, progress

    def repeat(array: jax.Array) -> jax.Array:
        return jnp.repeat(array, num_samples, axis=0)

    parents = repeat(progress.seq_ids)
    is_first = jnp.arange(parents.shape[0]) % num_samples == 0
    cache, forked = fork(cache, jnp.where(is_first, NO_SEQUENCE, parents))
    return cache, progress._replace(
        seq_ids=jnp.where(is_first, parents, forked.seq_ids),
        reasons=add_reasons(repeat(progress.reasons), forked.status),
        num_done=repeat(progress.num_done),
    )


def _append_chunk(
    cache: Cache, prompts: Prompts, progress: Progress, num_rows: int
) -> tuple[jax.Array, Cache, Batch]:
    """Append the next tokens of the prompts, each what those before it leave it.

    Returns:
      i32[R], the tokens; the cache; and the batch.
    """
    left = progress.count_left(prompts)
    starts = jnp.cumsum(left, dtype=jnp.int32) - left
    count = jnp.clip(num_rows - starts, 0, left)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    column = row + (progress.num_done - (ends - count)).at[owner].get(mode="clip")
    tokens = prompts.tokens.at[owner, column].get(mode="fill", fill_value=0)
    seq_ids = jnp.where(count > 0, progress.seq_ids, NO_SEQUENCE)
    cache, batch = append(cache, seq_ids, count, capacity=num_rows, tokens=tokens)
    return tokens, cache, batch


def _end_step(
    cache: Cache, progress: Progress, batch: Batch, num_done: jax.Array
) -> tuple[Cache, Progress]:
    """Count a step and free the prompts that it ended."""
    # The first prompt that does not fit never will, for those before it keep what they
    # have. Those behind it were refused with it and try again.
    refused = batch.status == Status.OUT_OF_BLOCKS
    waits = refused & ~keep_first(refused)
    reasons = add_reasons(progress.reasons, batch.status, waits=waits)
    statistics = count_step(progress.statistics, cache, num_done)
    cache, seq_ids = free_ended(cache, progress.seq_ids, reasons)
    num_done = jnp.where(seq_ids >= 0, num_done, 0)
    return cache, Progress(seq_ids, reasons, num_done, statistics)

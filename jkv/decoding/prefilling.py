"""Prompts are computed in chunks, and the logits after each one's end are kept.

For loops that begin with all of their prompts at one time. The queue of `generate`
computes prompts beside single tokens instead.

Symbols: Q prompts, P most prompt tokens, R rows of a step, V tokens in the vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jkv.decoding.model import Model, call_model
from jkv.decoding.prompts import Prompts
from jkv.decoding.scheduling.rows import locate_rows, share_rows
from jkv.sharding.loops import while_loop
from jkv.state import NO_SEQUENCE, Cache
from jkv.verbs.appending import append
from jkv.verbs.prefixes import commit

# The last says whether the last step served any prompt.
Carry = tuple[Cache, jax.Array, jax.Array, jax.Array, jax.Array]


def compute_prompts(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: Prompts,
    seq_ids: jax.Array,  # i32[Q]
    *,
    chunk_size: int,
    logits: jax.Array,  # f32[Q, V]
) -> tuple[Cache, jax.Array, jax.Array]:
    """Put prompts in the cache, until all are there or none finds a block.

    Args:
      model, params: as for `generate`.
      cache: with blocks reserved for the prompts.
      prompts: Q of them.
      seq_ids: i32[Q], the sequence of each; -1 is not computed. What the cache has of a
        prompt is not computed again.
      chunk_size: rows of a step, if no more prompts than that are computed.
      logits: f32[Q, V], those after prompts that are in the cache.

    Returns:
      The cache; f32[Q, V], the logits after each prompt; and i32[], the steps it took.
    """
    num_prompts = prompts.lengths.shape[0]
    num_rows = count_rows(prompts, chunk_size)
    ages = jnp.arange(num_prompts, dtype=jnp.int32)

    def step(carry: Carry) -> Carry:
        cache, kept, left, num_steps, _ = carry
        counts = share_rows(left, ages, num_rows)
        done = prompts.lengths - left
        owner, position = locate_rows(counts, done, num_rows)
        tokens = prompts.tokens.at[owner, position].get(mode="clip")
        tokens = jnp.maximum(tokens, 0)
        ids = jnp.where(counts > 0, seq_ids, NO_SEQUENCE)
        cache, batch = append(cache, ids, counts, capacity=num_rows, tokens=tokens)
        logits, cache = call_model(model, params, tokens, cache, batch)
        cache = commit(cache, batch)
        served = batch.query_lengths > 0
        is_whole = served & (counts == left)
        kept = jnp.where(is_whole[:, None], logits.astype(jnp.float32), kept)
        left = count_left(cache, prompts, seq_ids)
        return cache, kept, left, num_steps + 1, jnp.any(served)

    left, zero = count_left(cache, prompts, seq_ids), jnp.zeros((), jnp.int32)
    cache, logits, _, num_steps, _ = while_loop(
        lambda carry: jnp.any(carry[2] > 0) & carry[4],
        step,
        (cache, logits, left, zero, jnp.ones((), bool)),
    )
    return cache, logits, num_steps


def count_rows(prompts: Prompts, chunk_size: int) -> int:
    """Return the rows of a step."""
    return max(prompts.lengths.shape[0], min(chunk_size, prompts.tokens.size))


def count_left(cache: Cache, prompts: Prompts, seq_ids: jax.Array) -> jax.Array:
    """Return the tokens of each prompt that its sequence lacks, i32[Q]; 0 for none."""
    row = jnp.where(seq_ids >= 0, seq_ids, cache.max_sequences)
    done = cache.metadata.context_lengths.at[row].get(mode="fill", fill_value=0)
    return jnp.where(seq_ids >= 0, prompts.lengths - done, 0)

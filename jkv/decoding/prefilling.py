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

Carry = tuple[Cache, jax.Array, jax.Array, jax.Array]


def compute_prompts(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: Prompts,
    seq_ids: jax.Array,  # i32[Q]
    *,
    chunk_size: int,
    vocabulary: int,
) -> tuple[Cache, jax.Array, jax.Array]:
    """Put prompts in the cache.

    Args:
      model, params: as for `generate`.
      cache: with blocks reserved for the prompts.
      prompts: Q of them.
      seq_ids: i32[Q], the sequence of each; -1 is not computed. What the prefix index
        had of a prompt is in its sequence already.
      chunk_size: rows of a step, if no more prompts than that are computed.
      vocabulary: V.

    Returns:
      The cache; f32[Q, V], the logits after each prompt; and i32[], the steps it took.
    """
    num_prompts = prompts.lengths.shape[0]
    num_rows = max(num_prompts, min(chunk_size, prompts.tokens.size))
    ages = jnp.arange(num_prompts, dtype=jnp.int32)
    row_of = jnp.where(seq_ids >= 0, seq_ids, cache.metadata.max_sequences)

    def find_left(cache: Cache) -> tuple[jax.Array, jax.Array]:
        done = cache.metadata.context_lengths.at[row_of].get(mode="fill", fill_value=0)
        return done, jnp.where(seq_ids >= 0, prompts.lengths - done, 0)

    def step(carry: Carry) -> Carry:
        cache, kept, left, num_steps = carry
        done, _ = find_left(cache)
        counts = share_rows(left, ages, num_rows)
        owner, position = locate_rows(counts, done, num_rows)
        tokens = prompts.tokens.at[owner, position].get(mode="clip")
        tokens = jnp.maximum(tokens, 0)
        ids = jnp.where(counts > 0, seq_ids, NO_SEQUENCE)
        cache, batch = append(cache, ids, counts, capacity=num_rows, tokens=tokens)
        logits, cache = call_model(model, params, tokens, cache, batch)
        cache = commit(cache, batch)
        is_whole = (counts > 0) & (counts == left)
        kept = jnp.where(is_whole[:, None], logits.astype(jnp.float32), kept)
        return cache, kept, find_left(cache)[1], num_steps + 1

    cache, logits, _, num_steps = while_loop(
        lambda carry: jnp.any(carry[2] > 0),
        step,
        (
            cache,
            jnp.zeros((num_prompts, vocabulary), jnp.float32),
            find_left(cache)[1],
            jnp.zeros((), jnp.int32),
        ),
    )
    return cache, logits, num_steps

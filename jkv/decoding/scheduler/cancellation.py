"""Cancellation: a host ends sequences between two windows of steps."""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.decoding.scheduler.release import release_ended
from jkv.decoding.scheduler.state import GenerationState
from jkv.decoding.texts.results import FinishReason
from jkv.state import Cache
from jkv.state.entry import takes_cache


@takes_cache()
def cancel(
    cache: Cache, state: GenerationState, sequences: jax.Array
) -> tuple[Cache, GenerationState]:
    """End sequences where they are, running or waiting, and free their blocks.

    Their tokens so far are kept. Others go on as if these had never been.

    Args:
      cache: from `prefill` or `decode`; jit may donate it.
      state: what came with the cache; jit may donate it, too.
      sequences: bool[N], which to end; those that have ended stay as they are.

    Returns:
      The cache and the state.

    Raises:
      ValueError: for anything but one bool for each sequence.

    Example:
      >>> import jax, jax.numpy as jnp, jkv
      >>> from jkv.decoding import cancel, prefill
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16))
      >>> cache, state = prefill(
      ...     count_on, None, cache, [[5, 6, 7], [40]], max_new_tokens=4)
      >>> cache, state = cancel(cache, state, jnp.array([True, False]))
      >>> state.is_running.tolist(), int(jkv.num_free_blocks(cache))
      ([False, True], 7)
    """
    expected = state.result.reasons.shape
    if sequences.shape != expected or sequences.dtype != jnp.bool_:
        raise ValueError(
            f"sequences must be bool{list(expected)}, whether to end each one, got "
            f"{sequences.dtype}{list(sequences.shape)}"
        )
    reasons = jnp.where(
        state.is_running & sequences,
        jnp.int32(FinishReason.CANCELLED),
        state.result.reasons,
    )
    state = dataclasses.replace(state, result=state.result._replace(reasons=reasons))
    return release_ended(cache, state)

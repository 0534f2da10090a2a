"""How sequences of a generation end: a reason each, and their blocks returned.

A sequence that is refused a block need not end. It waits while others go on, which may
end and return theirs; who waits and who ends is decided by the callers.
"""

import jax
import jax.numpy as jnp

from jkv.decoding.results import FinishReason
from jkv.state import NO_SEQUENCE, Cache
from jkv.status import Status
from jkv.verbs.allocation import free

# Refusals of the cache that end a sequence. No other status can occur here.
_REASONS = {
    Status.CONTEXT_FULL: FinishReason.CONTEXT_FULL,
    Status.OUT_OF_BLOCKS: FinishReason.OUT_OF_BLOCKS,
    Status.OUT_OF_SEQUENCES: FinishReason.OUT_OF_SEQUENCES,
    Status.INVALID_SEQUENCE: FinishReason.CANCELLED,
}


def add_reasons(
    reasons: jax.Array,  # i32[B]
    status: jax.Array,  # i32[B]
    *,
    waits: jax.Array | None = None,  # bool[B]
) -> jax.Array:
    """Give each running sequence that was refused its reason.

    Args:
      reasons: i32[B], `FinishReason`.
      status: i32[B], what the cache answered.
      waits: bool[B], sequences that go on although they were refused.

    Returns:
      The reasons, i32[B].
    """
    if waits is not None:
        status = jnp.where(waits, jnp.int32(Status.OK), status)
    is_running = reasons == FinishReason.RUNNING
    for refusal, reason in _REASONS.items():
        reasons = jnp.where(
            is_running & (status == refusal), jnp.int32(reason), reasons
        )
    return reasons


def free_ended(
    cache: Cache, seq_ids: jax.Array, reasons: jax.Array
) -> tuple[Cache, jax.Array]:
    """Free the sequences that have a reason; their ids become padding."""
    ended = reasons != FinishReason.RUNNING
    cache, _ = free(cache, jnp.where(ended, seq_ids, NO_SEQUENCE))
    return cache, jnp.where(ended, NO_SEQUENCE, seq_ids)


def keep_first(mask: jax.Array) -> jax.Array:
    """Return the mask, bool[B], with nothing left but its first entry."""
    return mask & (jnp.cumsum(mask, dtype=jnp.int32) == 1)


def keep_last(mask: jax.Array) -> jax.Array:
    """Return the mask, bool[B], with nothing left but its last entry."""
    return jnp.flip(keep_first(jnp.flip(mask)))

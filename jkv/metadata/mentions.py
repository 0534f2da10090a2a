"""Which lane is the first, or the last, to name an id: a scatter of minima tells."""

import jax
import jax.numpy as jnp


def is_first(ids: jax.Array, size: int) -> jax.Array:
    """Return whether no earlier lane names the same id, bool[P].

    Args:
      ids: i32[P], not negative; what is `size` or above counts as named once.
      size: how many ids there are.
    """
    lane = jnp.arange(ids.shape[0], dtype=jnp.int32)
    earliest = jnp.full((size,), ids.shape[0], jnp.int32).at[ids].min(lane, mode="drop")
    last = jnp.iinfo(jnp.int32).max
    return earliest.at[ids].get(mode="fill", fill_value=last) >= lane


def mark_lowest(
    marks: jax.Array, ids: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return which lane has the lowest key of those that name the same id.

    The marks are zeros of an array that the caller has anyway, so that no scratch of
    its size must be made; the caller puts the zeros back.

    Args:
      marks: i32[N], 0 at all ids named.
      ids: i32[P], N for none.
      key: i32[P], below 0, distinct.

    Returns:
      The marks, now the lowest key at each id named, and bool[P].
    """
    marks = marks.at[ids].min(key, mode="drop")
    lowest = marks.at[ids].get(mode="fill", fill_value=0) == key
    return marks, lowest & (ids < marks.shape[0])

"""Parts of blocks: several devices have a sequence, each an equal part of its blocks.

Of each block of T tokens the first of n devices has the first T / n, and so on. What
one of them has of a sequence lies in its pool as a shorter sequence does, without gaps
and in order, so it is attended to as such: all that is needed is where a row's own
position falls in it. What the devices find is joined by its log-sum-exp, as pieces of
a context are on one device.
"""

import jax
import jax.numpy as jnp
from jax import lax


def find_held(
    positions: jax.Array,  # i32[...], in the sequence
    # i32[], which part of each block is held here; None where blocks are whole
    part: jax.Array | None,
    num_parts: int,  # of a block
    block_size: int,  # tokens of a part
) -> jax.Array:
    """Return which token held here is the last one up to each position.

    Tokens held here are counted from 0; -1 stands for none of them, as a position
    before the first does.
    """
    if part is None:
        return positions
    count = jnp.maximum(positions + 1, 0)
    num_blocks = lax.div(count, jnp.int32(num_parts * block_size))
    rest = count - num_blocks * (num_parts * block_size)
    in_block = jnp.clip(rest - part * block_size, 0, block_size)
    return num_blocks * block_size + in_block - 1


def join_parts(
    # f32[R, H, Dv], what they see on this device; zeros for a row that sees nothing
    output: jax.Array,
    # f32[R, H], the log-sum-exp of that, -inf for a row that sees nothing
    lse: jax.Array,
    sinks: jax.Array | None,  # [H], a logit per head, None for none
    axis: str,  # of the mesh
) -> tuple[jax.Array, jax.Array]:
    """Return what rows see on all devices of a mesh axis, f32[R, H, Dv] and f32[R, H].

    Inside `shard_map`. A sink is counted once, here.
    """
    # Any common shift will do, so none of it has a derivative.
    highest = lax.pmax(lax.stop_gradient(lse), axis)
    sees = highest > -jnp.inf
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)[None]
        highest = jnp.maximum(highest, lax.stop_gradient(sinks))
    shift = jnp.where(sees, highest, 0.0)
    # Side by side: one sum of one array, which nothing must take apart before.
    weight = jnp.exp(lse - shift)[..., None]
    both = jnp.concatenate([weight * output, weight], axis=-1)
    both = lax.psum(both, axis)
    summed, total = both[..., :-1], both[..., -1]
    if sinks is not None:
        total += jnp.where(sees, jnp.exp(sinks - shift), 0.0)
    total = jnp.where(sees, total, 1.0)
    return summed / total[..., None], jnp.where(sees, shift + jnp.log(total), -jnp.inf)

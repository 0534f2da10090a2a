"""What a parked text keeps: blocks that are pinned on the device, or a host copy.

A text is pinned by a sequence that holds what the prefix index has of it, so that the
next prompt that begins with the text finds it. On the host it is a `Swapped`; what
comes back becomes visible in the index again.

Symbols: P, the most tokens of a text.
"""

import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.prefixes.recommitment import recommit
from jkv.state import Cache
from jkv.status import Status
from jkv.storage.swapped import Swapped
from jkv.verbs.allocation import allocate, free
from jkv.verbs.swapping import swap_in, swap_out


class Pinned(NamedTuple):
    """A sequence of the cache that holds a text's blocks; the host need not look."""

    seq_ids: jax.Array  # i32[1], -1 where the cache had no row for it
    num_tokens: jax.Array  # i32[1], tokens that were found


# What there is of a text beside its tokens.
Stay: TypeAlias = Pinned | Swapped | None


def pin(cache: Cache, text: np.ndarray, salt: int) -> tuple[Cache, Pinned]:
    """Start to hold the full blocks that the prefix index has of a text, i32[P]."""
    cache, seq_ids, num_tokens = _pin(cache, text[None], np.full((1,), salt, np.int32))
    return cache, Pinned(seq_ids, num_tokens)


def unpin(cache: Cache, pinned: Pinned) -> Cache:
    """Let blocks go; they are found until the pool hands them out."""
    return free(cache, pinned.seq_ids)[0]


def move_to_host(cache: Cache, pinned: Pinned) -> tuple[Cache, Swapped | None]:
    """Copy pinned blocks to the host, and let them go; None where there are none."""
    if int(pinned.num_tokens[0]) == 0:
        return unpin(cache, pinned), None
    return swap_out(cache, pinned.seq_ids)


def bring_back(
    cache: Cache,
    text: np.ndarray,  # i32[P], -1 past its end
    salt: int,  # its domain
    swapped: Swapped,  # what `move_to_host` made of it
) -> tuple[Cache, Stay]:
    """Pin a text whose blocks are on the host, unless the cache has no room for it."""
    cache, found = pin(cache, text, salt)
    if int(found.num_tokens[0]) >= int(swapped.context_lengths[0]):
        return cache, found  # nobody has taken them meanwhile
    cache, back = swap_in(unpin(cache, found), swapped, donate=True)
    if int(back.status[0]) != Status.OK:
        return cache, swapped
    cache = _recommit(cache, back.seq_ids, text[None])
    return cache, Pinned(back.seq_ids, jnp.asarray(swapped.context_lengths))


@functools.partial(jax.jit, donate_argnames="cache")
def _pin(
    cache: Cache, texts: jax.Array, salts: jax.Array
) -> tuple[Cache, jax.Array, jax.Array]:
    cache, opened = allocate(cache, 0, tokens=texts, salts=salts)
    return cache, opened.seq_ids, opened.num_cached


_recommit = jax.jit(recommit, donate_argnames="cache")

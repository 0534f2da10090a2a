"""Sections of head dims: every tile is a power of two, and none is narrower than 16.

Where less is left, the last section takes columns of the one before it again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# The hardware multiplies no tile narrower than this.
MIN_SIZE = 16


# Elements of one byte that are loaded as one number.
WORD_SIZE = 4


class Section(NamedTuple):
    """Consecutive columns of a head dim."""

    start: int | jax.Array
    size: int  # a power of two
    num_repeated: int = 0  # the first of them, which the section before has, too

    @property
    def columns(self) -> jax.Array:
        """Return them as indices, i32[1, size]."""
        return (self.start + jnp.arange(self.size, dtype=jnp.int32))[None, :]

    @property
    def words(self) -> jax.Array:
        """Return the words whose bytes they are, i32[1, size / 4]."""
        index = jnp.arange(self.size // WORD_SIZE, dtype=jnp.int32)
        return (self.start // WORD_SIZE + index)[None, :]

    def over(self, mask: jax.Array) -> jax.Array:
        """Repeat a mask over the columns that are its own, bool[..., size]."""
        whole = jnp.broadcast_to(mask[:, None], (*mask.shape, self.size))
        if not self.num_repeated:
            return whole
        index = jnp.arange(self.size, dtype=jnp.int32)
        return whole & (index >= self.num_repeated)[None, :]


def cut(head_dim: int, start: int = 0, max_size: int = 512) -> list[Section]:
    """Cut a head dim into powers of two, none of them larger than one.

    96 is 64 and 32. 72 is 64 and the last 16, of which 8 are repeated: zeros in
    queries, so that no score has them twice, and not stored twice. 120 is 64 and the
    last 64.
    """
    end, whole = start + head_dim, fill_head_dim(head_dim)
    sizes = [size for size in (512, 256, 128, 64, 32, 16) if whole & size]
    if end < sizes[-1]:  # one section, with more columns than there are
        sizes = [whole // 2, whole // 2]
    sections = []
    for size in _cut_to(sizes, max_size):
        num_repeated = max(0, start + size - end)
        sections.append(Section(start - num_repeated, size, num_repeated))
        start += size
    return sections


def _cut_to(sizes: list[int], max_size: int) -> list[int]:
    return [min(size, max_size) for size in sizes for _ in range(-(-size // max_size))]


def fill_head_dim(head_dim: int) -> int:
    """Return the columns that are multiplied, a multiple of the narrowest tile."""
    return -(-head_dim // MIN_SIZE) * MIN_SIZE

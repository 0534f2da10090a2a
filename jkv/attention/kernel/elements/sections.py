"""Sections of head dims: powers of two, not narrower than 16.

If fewer columns remain, the last section repeats columns of the one before it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# The narrowest tile of matrix instructions.
MIN_SIZE = 16


# One-byte elements per loaded word.
WORD_SIZE = 4


class Section(NamedTuple):
    """Consecutive columns of a head dim."""

    start: int | jax.Array
    size: int  # a power of two
    num_repeated: int = 0  # leading columns that the section before also has

    @property
    def columns(self) -> jax.Array:
        """The columns as indices, i32[1, size]."""
        return (self.start + jnp.arange(self.size, dtype=jnp.int32))[None, :]

    @property
    def words(self) -> jax.Array:
        """The words of the columns' bytes, i32[1, size / 4]."""
        index = jnp.arange(self.size // WORD_SIZE, dtype=jnp.int32)
        return (self.start // WORD_SIZE + index)[None, :]

    def over(self, mask: jax.Array) -> jax.Array:
        """Broadcast a mask over the columns that are not repeated, bool[..., size]."""
        whole = jnp.broadcast_to(mask[:, None], (*mask.shape, self.size))
        if not self.num_repeated:
            return whole
        index = jnp.arange(self.size, dtype=jnp.int32)
        return whole & (index >= self.num_repeated)[None, :]


def cut(head_dim: int, start: int = 0, max_size: int = 512) -> list[Section]:
    """Cut a head dim into sections of at most `max_size` columns.

    96 is 64 and 32. 72 is 64 and the last 16, with 8 repeated: zero in queries, so that
    scores count them once, and not stored twice. 120 is 64 and the last 64.
    """
    end, whole = start + head_dim, fill_head_dim(head_dim)
    sizes = [size for size in (512, 256, 128, 64, 32, 16) if whole & size]
    if end < sizes[-1]:  # a single section would have too many columns
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
    """Round a head dim up to a multiple of the narrowest tile."""
    return -(-head_dim // MIN_SIZE) * MIN_SIZE

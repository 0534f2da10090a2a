"""How tokens are chosen: what steers a text, then sampling from what that leaves."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jkv.decoding.sampling.draws import sample
from jkv.decoding.sampling.filters import PerRow, by_row
from jkv.decoding.sampling.options import Sampling
from jkv.steering import Steering

Chunk = TypeVar("Chunk")
Results = TypeVar("Results")


class Choice(NamedTuple):
    """How the tokens of N sequences are chosen."""

    sampling: Sampling
    steering: Steering | None = None
    # Rows that are chosen for at a time, so that bits do not depend on how many there
    # are; None: as they come.
    num_rows: int | None = None

    def sample(
        self,
        logits: jax.Array,  # f32[K, V]
        sampling: Sampling,  # of these rows, one number or K
        counts: jax.Array,  # i32[K], tokens that each has generated
        seen: jax.Array | None,  # bool[K, V] or None, as for `sample`
    ) -> tuple[jax.Array, jax.Array]:
        """Choose a token for each row, i32[K], with its log-probability, f32[K]."""
        if self.num_rows is None or self.num_rows == logits.shape[0]:
            return sample(logits, sampling, counts, seen=seen)
        rows = by_row(sampling, logits.shape[0])

        def choose(
            chunk: tuple[jax.Array, PerRow, jax.Array, jax.Array | None],
        ) -> tuple[jax.Array, jax.Array]:
            logits, rows, counts, seen = chunk
            return sample(logits, Sampling(**rows._asdict()), counts, seen=seen)

        return _map_chunks(choose, (logits, rows, counts, seen), self.num_rows)


def _map_chunks(
    function: Callable[[Chunk], Results], rows: Chunk, num_rows: int
) -> Results:
    """Call a function of rows for so many at a time; the last chunk is filled up."""
    count = jax.tree.leaves(rows)[0].shape[0]
    missing = -count % num_rows

    def cut(array: jax.Array) -> jax.Array:
        # The last row again: what is computed of it is dropped.
        last = jnp.broadcast_to(array[-1:], (missing, *array.shape[1:]))
        whole = jnp.concatenate([array, last])
        return whole.reshape(-1, num_rows, *array.shape[1:])

    found = lax.map(function, jax.tree.map(cut, rows))
    return jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:])[:count], found)

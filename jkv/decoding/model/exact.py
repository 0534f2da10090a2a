"""Steps of one shape, so that a text's bits do not depend on what runs beside it.

A product's rows differ in their last bits with the number of rows, and attention's with
the way in which a context is cut. So every call of the model has the same number of
rows and of requests, however much of them is used, and attention cuts contexts by
position (`by_position.py` of `jkv.attention.xla` and of `jkv.attention.kernel`).

Symbols: W requests of a call, R rows.
"""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from jkv.decoding.model.rows import CHUNK_SIZE
from jkv.metadata.requests import check_counts
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.status import UsageError
from jkv.verbs.attention_plan import plan_attention

# Requests and rows of a call, if the caller does not say.
_DEFAULT = 64, 64

ExactShape = bool | tuple[int, int]


class Exact(NamedTuple):
    """The shape of every call of the model."""

    num_requests: int  # W
    num_rows: int  # R, at least W

    @classmethod
    def of(cls, exact: ExactShape) -> Self | None:
        """Return what was asked for, a bool or (W, R); None for no fixed shape."""
        if exact is False:
            return None
        pair = _DEFAULT if exact is True else exact
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(
                f"exact must be True, False or (W, R), the requests and the rows of "
                f"every call of the model, got {exact!r}"
            )
        num_requests, num_rows = pair
        check_counts(exact=num_requests)
        check_counts(exact=num_rows)
        if num_rows < num_requests:
            raise UsageError(
                f"exact=(W, R) needs a row for each request, R of at least W, got "
                f"{pair}"
            )
        return cls(int(num_requests), int(num_rows))

    def check_alone(self, row_counts: tuple[int, ...] | None, chunk_size: int) -> None:
        """Refuse what would give a step another shape."""
        if row_counts is not None or chunk_size != CHUNK_SIZE:
            raise UsageError(
                f"exact={tuple(self)} fixes the rows of every step: leave out "
                f"row_counts and chunk_size"
            )

    def check_fits(self, name: str, number: int) -> None:
        """Refuse more of something than a call has requests."""
        if number > self.num_requests:
            raise UsageError(
                f"{name} is {number}, more than the {self.num_requests} requests of a "
                f"call: give exact=({number}, {max(number, self.num_rows)})"
            )

    def check_cache(self, cache: Cache) -> None:
        """Refuse a cache that keeps inputs of tokens which may be taken back."""
        if most := cache.metadata.max_pending:
            raise UsageError(
                f"exact= takes no guesses, so no tokens of a state are taken back: "
                f"leave out max_pending of StateConfig, which is {most}"
            )

    def pad(
        self,
        seq_ids: jax.Array,  # i32[B], -1 for none
        tokens: jax.Array,  # i32[r]; without counts one of each sequence
        counts: jax.Array | None,  # i32[B]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Fill a step up to W requests and R rows: i32[W], i32[R] and i32[W]."""
        more = (0, self.num_requests - seq_ids.shape[0])
        if counts is None:
            counts = (seq_ids >= 0).astype(jnp.int32)
            # Rows follow each other, without those of no sequence.
            row = jnp.cumsum(counts, dtype=jnp.int32) - 1
            row = jnp.where(counts > 0, row, self.num_rows)
            rows = jnp.zeros((self.num_rows,), jnp.int32)
            tokens = rows.at[row].set(tokens, mode="drop")
        else:
            tokens = jnp.pad(tokens, (0, self.num_rows - tokens.shape[0]))
        seq_ids = jnp.pad(seq_ids, more, constant_values=NO_SEQUENCE)
        return seq_ids, tokens, jnp.pad(counts, more)

    def fix(self, cache: Cache, batch: Batch) -> Batch:
        """Let attention to the rows of a step go by position alone."""
        batch = dataclasses.replace(batch, by_position=True, plan=None)
        return plan_attention(cache, batch)

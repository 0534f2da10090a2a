"""Cache rows of sequences without a place, for a host that swaps rolled ones.

A rolled sequence has dropped tokens, so the prefix cache cannot hold it. A host that
wants to continue it later marks it, takes its row once it has finished, and gives a row
back when the sequence returns as a prompt. Until then these rows are a preference: they
are freed first when blocks run out, and their sequences are recomputed from all of
their tokens, which drops the same ones at the same lengths.

Symbols: N sequences, W places, K lanes.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.decoding.sequences import blocks
from jkv.decoding.sequences.blocks import Blocks, BlockSize, Held
from jkv.metadata import ring
from jkv.operations import gather, running_sum, scatter
from jkv.state import NO_SEQUENCE, Cache
from jkv.verbs.allocation import Allocation, free

if TYPE_CHECKING:
    from jkv.decoding.scheduler.admission import Lanes
    from jkv.decoding.scheduler.state import GenerationState

Array: TypeAlias = jax.Array | np.ndarray[Any, Any]


class KeptRows(NamedTuple):
    """Rows of finished sequences for the host, and of waiting ones from it."""

    rows: jax.Array  # i32[N], the cache row of each sequence, -1 for none
    wanted: jax.Array  # bool[N], keep the row when the sequence finishes

    @classmethod
    def none(cls, num_sequences: int) -> "KeptRows":
        return cls(
            jnp.full((num_sequences,), NO_SEQUENCE, jnp.int32),
            jnp.zeros((num_sequences,), bool),
        )

    def keep(
        self, cache: Cache, state: "GenerationState", ended: jax.Array
    ) -> tuple["GenerationState", jax.Array]:
        """Keep the rows of wanted sequences that rolled, of finished places, bool[W].

        Return also the kept places, bool[W].
        """
        places = state.places
        keeps = ended & places.is_cached & gather(self.wanted, places.sequences)
        row = jnp.where(places.is_cached, places.seq_ids, cache.max_sequences)
        keeps &= cache.metadata.sequences.pruned.is_pruned(row)
        rank = running_sum(keeps.astype(jnp.int32))
        keeps &= rank <= self.count_spare(cache, state)
        sequence = jnp.where(keeps, places.sequences, self.rows.shape[0])
        kept = self._replace(rows=scatter(self.rows, sequence, places.seq_ids))
        return dataclasses.replace(state, kept=kept), keeps

    def follow(
        self, seq_ids: jax.Array, leaves: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Append the N rows to the rows that may be freed; none of them leaves."""
        stays = jnp.zeros(self.rows.shape, bool)
        return jnp.append(seq_ids, self.rows), jnp.append(leaves, stays)

    def must_leave(
        self, cache: Cache, state: "GenerationState", promised: Blocks
    ) -> jax.Array:
        """Return True if a kept row must leave, bool[].

        `promised` are the blocks that running sequences still need, i32[] per group. If
        no sequence runs, the first waiting one needs the blocks of the longest context,
        except those of its own row.
        """
        places = state.places
        waits = (places.num_started > places.num_running) | (state.queue.count > 0)
        starts = waits & (places.num_running == 0)
        own = Held.of(cache, gather(self.rows, _find_first(state))[None])
        longest = jnp.full((1,), cache.max_context_length, jnp.int32)
        more = blocks.to_take(longest, own, state.block_size(cache))
        needs = tuple(
            each + jnp.where(starts, of_first[0], 0)
            for each, of_first in zip(promised, more, strict=True)
        )
        is_short = ~blocks.reach(blocks.count_free_blocks(cache), needs)
        return jnp.any(self.rows >= 0) & is_short

    def prefer(
        self, state: "GenerationState", victim: jax.Array, is_held: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Choose a kept row as the victim, if there is any.

        Finished sequences leave first, and the first waiting one last. Return the index
        in the arrays of `follow`, and True if the victim has no place, bool[] each.
        """
        sequence = jnp.arange(len(self.rows), dtype=jnp.int32)
        order = 1 + (sequence != _find_first(state)).astype(jnp.int32)
        order = jnp.where(state.is_running, order, 3)
        order = jnp.where(self.rows >= 0, order, 0)
        index = state.places.num_places + 1 + jnp.argmax(order).astype(jnp.int32)
        is_kept = jnp.any(order > 0)
        return jnp.where(is_kept, index, victim), is_held | is_kept

    def leave(self, rank: jax.Array) -> "KeptRows":
        """Forget the rows of sequences `rank`, i32[K]; negative ones are none."""
        return self._replace(rows=scatter(self.rows, rank, NO_SEQUENCE))

    def skip(self, lanes: "Lanes", lengths: jax.Array) -> jax.Array:
        """Replace the tokens to allocate, i32[K], by -1 for lanes with a row."""
        return jnp.where(self._find(lanes) >= 0, NO_SEQUENCE, lengths)

    def seat(
        self, cache: Cache, state: "GenerationState", lanes: "Lanes", opened: Allocation
    ) -> tuple["GenerationState", Allocation]:
        """Give the lanes their rows, whose computed tokens count as cached."""
        row = self._find(lanes)
        has_row = row >= 0
        slots = blocks.count_cached(cache, row)
        found = blocks.count_positions(cache, row, slots)
        taken = jnp.where(has_row, lanes.sequences, NO_SEQUENCE)
        state = dataclasses.replace(state, kept=self.leave(taken))
        return state, opened._replace(
            seq_ids=jnp.where(has_row, row, opened.seq_ids),
            num_cached=jnp.where(has_row, found, opened.num_cached),
        )

    def costs(
        self,
        cache: Cache,
        sequences: jax.Array,  # i32[K]
        lengths: jax.Array,  # i32[K], slots to hold
        size: BlockSize,
    ) -> Blocks:
        """Return the blocks that waiting sequences need beside their rows, i32[K]."""
        held = Held.of(cache, gather(self.rows, sequences))
        return blocks.to_take(lengths, held, size)

    # Between two windows.

    def exchange(
        self,
        cache: Cache,
        state: "GenerationState",
        indices: Array,  # i32[K], sequences to be replaced, -1 for none
        rows: Array,  # i32[K], the rows of the new ones, -1 for none
        wanted: Array | None,  # bool[N], as in the field; None leaves it
    ) -> tuple[Cache, "GenerationState"]:
        """Set the rows of new sequences; free rows that the host has not taken."""
        indices, num_sequences = jnp.asarray(indices), self.rows.shape[0]
        wanted = self.wanted if wanted is None else jnp.asarray(wanted)
        index = jnp.where(indices < 0, num_sequences, indices)
        is_new = scatter(jnp.zeros((num_sequences,), bool), index, True)
        is_left = is_new | (~state.is_running & ~wanted)
        cache, _ = free(cache, jnp.where(is_left, self.rows, NO_SEQUENCE))
        kept = jnp.where(is_left, NO_SEQUENCE, self.rows)
        kept = scatter(kept, index, jnp.asarray(rows))
        return cache, dataclasses.replace(state, kept=KeptRows(kept, wanted))

    def free_all(
        self, cache: Cache, state: "GenerationState"
    ) -> tuple[Cache, "GenerationState"]:
        """Free all kept rows; waiting sequences are recomputed."""
        cache, _ = free(cache, self.rows)
        rows = jnp.full_like(self.rows, NO_SEQUENCE)
        return cache, dataclasses.replace(state, kept=self._replace(rows=rows))

    def count_spare(self, cache: Cache, state: "GenerationState") -> jax.Array:
        """Return the number of cache rows that no place needs, i32[]."""
        num_cached = jnp.sum(state.places.is_cached, dtype=jnp.int32)
        free_rows = cache.metadata.sequences.free_rows.count
        return free_rows + num_cached - state.most_running

    def _find(self, lanes: "Lanes") -> jax.Array:
        """Return the rows of lanes, i32[K], -1 for none."""
        rows = gather(self.rows, lanes.sequences, fill=NO_SEQUENCE)
        return jnp.where(lanes.leads, rows, NO_SEQUENCE)


def _find_first(state: "GenerationState") -> jax.Array:
    """Return the first waiting sequence, i32[]; arbitrary if none waits."""
    places = state.places
    oldest = jnp.argmax(places.ages == places.num_running)
    fresh = ring.peek(state.queue, jnp.zeros((1,), jnp.int32))[0]
    is_preempted = places.num_started > places.num_running
    return jnp.where(is_preempted, gather(places.sequences, oldest), fresh)

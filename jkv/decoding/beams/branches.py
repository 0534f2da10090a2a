"""State of beam searches, and their cache rows: open, fork, reorder, free.

Each beam has a cache row. A prompt is computed in one row and forked. After a step the
best child of a beam continues in its row; the others take rows without a child and
share their parents' blocks (`reorder`).

If rows or blocks run out, the search of the last prompt is preempted and starts over
later. So only a search that runs alone can lack any.

Symbols: Q prompts, K beams of each, G most new tokens.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jkv.decoding.beams.hypotheses import Beams, Hypotheses
from jkv.decoding.sequences import blocks
from jkv.decoding.sequences.blocks import Blocks, BlockSize, Held
from jkv.decoding.sequences.prompts import Prompts
from jkv.decoding.sequences.results import BeamStatistics, FinishReason
from jkv.operations import divide, when, while_loop
from jkv.state import NO_SEQUENCE, Cache
from jkv.status import Status
from jkv.verbs.allocation import allocate, free
from jkv.verbs.branching import fork, reorder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SearchState:
    """All searches of a call: running ones, in lockstep, and waiting ones."""

    prompts: Prompts  # prompts to complete
    reasons: jax.Array  # i32[Q], RUNNING if the search runs or waits
    is_running: jax.Array  # bool[Q], running searches
    seq_ids: jax.Array  # i32[Q, K], cache row of each beam, -1 for none
    beams: Beams  # running beams; their last token is not in the cache
    hypotheses: Hypotheses  # finished completions
    length: jax.Array  # i32[], new tokens of each running beam
    statistics: BeamStatistics
    # State of the logits processor, arrays [Q * K, ...]; None without one.
    processor_state: Any = None

    @classmethod
    def begin(
        cls, prompts: Prompts, reasons: jax.Array, num_beams: int, max_new_tokens: int
    ) -> "SearchState":
        """Return a state in which all prompts without a finish reason wait."""
        sizes = reasons.shape[0], num_beams
        return cls(
            prompts=prompts,
            reasons=reasons,
            is_running=jnp.zeros(reasons.shape, bool),
            seq_ids=jnp.full(sizes, NO_SEQUENCE, jnp.int32),
            beams=Beams.fresh(*sizes, max_new_tokens),
            hypotheses=Hypotheses.none(*sizes, max_new_tokens),
            length=jnp.zeros((), jnp.int32),
            statistics=BeamStatistics.zeros(),
        )

    @property
    def is_open(self) -> jax.Array:
        """True for searches that have not finished, running or waiting, bool[Q]."""
        return self.reasons == FinishReason.RUNNING

    @property
    def num_beams(self) -> int:
        """The number of beams of each prompt, K."""
        return self.seq_ids.shape[1]

    @property
    def first_seq_ids(self) -> jax.Array:
        """The row of the first beam of each running prompt, i32[Q], else -1."""
        return jnp.where(self.is_running, self.seq_ids[:, 0], NO_SEQUENCE)

    @property
    def flat_seq_ids(self) -> jax.Array:
        """The rows of running beams, prompt by prompt, i32[Q * K], else -1."""
        rows = jnp.where(self.is_running[:, None], self.seq_ids, NO_SEQUENCE)
        return rows.reshape(-1)

    def count(self, **counts: jax.Array) -> "SearchState":
        return dataclasses.replace(self, statistics=self.statistics.add(**counts))

    def end(self, ends: jax.Array, reasons: jax.Array) -> "SearchState":
        """End searches, bool[Q], for these reasons, i32[Q] or i32[]."""
        return dataclasses.replace(
            self,
            is_running=self.is_running & ~ends,
            reasons=jnp.where(ends, reasons, self.reasons),
        )


Carry = tuple[Cache, SearchState, jax.Array]


def open_prompts(
    cache: Cache, state: SearchState, size: BlockSize
) -> tuple[Cache, SearchState]:
    """Open a row for each waiting prompt, as many as fit with all their beams."""
    prompts = state.prompts
    cache, opened = allocate(
        cache,
        jnp.where(state.is_open, prompts.lengths, NO_SEQUENCE),
        tokens=prompts.tokens,
        salts=prompts.salts,
    )
    seq_ids = jnp.full_like(state.seq_ids, NO_SEQUENCE).at[:, 0].set(opened.seq_ids)
    is_running = opened.seq_ids >= 0
    state = dataclasses.replace(state, seq_ids=seq_ids, is_running=is_running)

    # No other search runs: if the first waiting one does not fit now, it never will.
    first = jnp.arange(is_running.shape[0]) == jnp.argmax(state.is_open)
    lacks_rows = opened.status == Status.OUT_OF_SEQUENCES
    state = state.end(
        first & state.is_open & ~is_running,
        _lacking(lacks_rows),
    )
    # A prompt longer than a sliding window is reserved only in part.
    needs = blocks.to_take(prompts.lengths, Held.of(cache, opened.seq_ids), size)
    cache, state = make_room_for_forks(cache, state, needs)
    cached = jnp.where(state.is_running, opened.num_cached, 0)
    computed = jnp.where(state.is_running, prompts.lengths - opened.num_cached, 0)
    return cache, state.count(
        cached_tokens=jnp.sum(cached, dtype=jnp.int32),
        prompt_tokens=jnp.sum(computed, dtype=jnp.int32),
    )


def make_room_for_forks(
    cache: Cache, state: SearchState, num_blocks: Blocks
) -> tuple[Cache, SearchState]:
    """Preempt searches until the others can fork after `num_blocks`, i32[Q]."""
    _, tail = divide(state.prompts.lengths, cache.block_size)
    more = jnp.int32(state.num_beams - 1)
    # Each beam but the first copies a partly filled block.
    copies = jnp.where(tail > 0, more, 0)
    needs = tuple(each + copies for each in num_blocks)
    cache, state, lacking = make_room_for_beams(
        cache, state, needs, jnp.full_like(tail, more)
    )
    return cache, state.end(lacking != FinishReason.RUNNING, lacking)


def fork_prompts(cache: Cache, state: SearchState) -> tuple[Cache, SearchState]:
    """Fork each prompt from its first beam to all its beams."""
    if state.num_beams == 1:
        return cache, state
    first = jnp.where(state.is_running, state.seq_ids[:, 0], NO_SEQUENCE)
    cache, forked = fork(cache, jnp.repeat(first, state.num_beams - 1))
    others = forked.seq_ids.reshape(-1, state.num_beams - 1)
    return cache, dataclasses.replace(
        state, seq_ids=jnp.concatenate([state.seq_ids[:, :1], others], axis=1)
    )


def follow_parents(
    cache: Cache, state: SearchState, parents: jax.Array
) -> tuple[Cache, SearchState]:
    """Continue each running beam from its parent, i32[Q, K]."""
    rows = assign_rows(state.seq_ids, parents)
    sources = jnp.take_along_axis(state.seq_ids, parents, axis=1)
    moves = (rows != sources) & state.is_running[:, None]
    cache, _ = reorder(
        cache,
        jnp.where(moves, rows, NO_SEQUENCE).reshape(-1),
        sources.reshape(-1),
    )
    state = dataclasses.replace(
        state,
        seq_ids=jnp.where(state.is_running[:, None], rows, state.seq_ids),
    )
    return cache, state.count(forked_beams=jnp.sum(moves, dtype=jnp.int32))


def assign_rows(
    seq_ids: jax.Array,  # i32[Q, K]
    parents: jax.Array,  # i32[Q, K]
) -> jax.Array:
    """Return the row of each beam, i32[Q, K]: its parent's, or a spare one.

    The first child of a parent takes the parent's row, so that only branching beams are
    copied. The n-th of the other children takes the n-th row without a child.
    """
    num_beams = parents.shape[1]
    beam = jnp.arange(num_beams, dtype=jnp.int32)
    is_same = parents[:, :, None] == parents[:, None]
    is_first = ~jnp.any(is_same & (beam[:, None] > beam[None])[None], axis=2)
    is_spare = ~jnp.any(parents[:, :, None] == beam[None, None], axis=1)
    rank = jnp.cumsum(~is_first, axis=1, dtype=jnp.int32)
    spare_rank = jnp.cumsum(is_spare, axis=1, dtype=jnp.int32)
    takes = is_spare[:, None] & (spare_rank[:, None] == rank[:, :, None])
    spare = jnp.argmax(takes, axis=2).astype(jnp.int32)
    return jnp.take_along_axis(seq_ids, jnp.where(is_first, parents, spare), axis=1)


def make_room_for_beams(
    cache: Cache, state: SearchState, num_blocks: Blocks, num_rows: jax.Array
) -> tuple[Cache, SearchState, jax.Array]:
    """Preempt searches, the last prompt's first, until the others have room.

    Returns also i32[Q]: the finish reason of a search that lacks room alone, which is
    freed; RUNNING for others.
    """

    def lacks(cache: Cache, state: SearchState) -> tuple[jax.Array, jax.Array]:
        rows, *needs = blocks.total(
            tuple(jnp.where(state.is_running, n, 0) for n in (num_rows, *num_blocks))
        )
        has_blocks = blocks.reach(blocks.count_free_blocks(cache), tuple(needs))
        return rows > cache.metadata.sequences.free_rows.count, ~has_blocks

    def goes_on(carry: Carry) -> jax.Array:
        lacks_rows, lacks_blocks = lacks(*carry[:2])
        return lacks_rows | lacks_blocks

    def trip(carry: Carry) -> Carry:
        cache, state, lacking = carry
        cache, state, of_last = let_last_wait(cache, state, lacks(cache, state)[0])
        is_new = of_last != FinishReason.RUNNING
        return cache, state, jnp.where(is_new, of_last, lacking)

    nothing = jnp.full(state.reasons.shape, FinishReason.RUNNING, jnp.int32)
    return while_loop(goes_on, trip, (cache, state, nothing))


def let_last_wait(cache: Cache, state: SearchState, lacks_rows: jax.Array) -> Carry:
    """Preempt the last search; return also its finish reason if it is alone, i32[Q]."""
    number = jnp.arange(state.is_running.shape[0], dtype=jnp.int32)
    last = number == jnp.max(jnp.where(state.is_running, number, -1))
    is_alone = jnp.sum(state.is_running, dtype=jnp.int32) == 1
    running = jnp.int32(FinishReason.RUNNING)
    lacking = jnp.where(last & is_alone, _lacking(lacks_rows), running)
    cache = free_beams(cache, state, last)
    state = dataclasses.replace(state, is_running=state.is_running & ~last)
    return cache, state.count(restarts=(~is_alone).astype(jnp.int32)), lacking


def free_beams(cache: Cache, state: SearchState, ended: jax.Array) -> Cache:
    """Free the rows of prompts, bool[Q]."""
    rows = jnp.where(ended[:, None], state.seq_ids, NO_SEQUENCE).reshape(-1)
    return when(jnp.any(ended), lambda cache, rows: free(cache, rows)[0], cache, rows)


def count_blocks(cache: Cache, state: SearchState) -> SearchState:
    """Record the blocks in use, and the number without sharing."""
    old = state.statistics
    lengths, size = (
        state.prompts.lengths + state.length,
        blocks.find_block_size(cache, (1,)),
    )
    whole = blocks.sum_groups(blocks.of_tokens(lengths, size))
    each = jnp.where(state.is_running, whole * state.num_beams, 0)
    statistics = old._replace(
        peak_blocks=jnp.maximum(old.peak_blocks, blocks.count_used_blocks(cache)),
        unshared_peak_blocks=jnp.maximum(
            old.unshared_peak_blocks, jnp.sum(each, dtype=jnp.int32)
        ),
    )
    return dataclasses.replace(state, statistics=statistics)


def _lacking(lacks_rows: jax.Array) -> jax.Array:
    return jnp.where(
        lacks_rows,
        jnp.int32(FinishReason.OUT_OF_SEQUENCES),
        jnp.int32(FinishReason.OUT_OF_BLOCKS),
    )

"""Draft model: its cache rows and the draft tokens it generates.

Each place has a row in the draft model's cache with a prefix of its sequence, never
with rejected tokens. A place with a new sequence starts from nothing. Before drafting,
the draft model computes the tokens it lacks, mostly the one or two of the last step.

Symbols: W places, K draft tokens of each, R rows of a step, V vocabulary size.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.model.runner import (
    Chunk,
    ChunkSizes,
    Runner,
    Unread,
    run_chunk,
    run_chunks,
)
from jkv.decoding.processors.rows import is_nothing_left
from jkv.decoding.sampling.draws import Choice, by_row, draw, filter_logits
from jkv.decoding.sampling.next_token import sampling_of
from jkv.decoding.scheduler.state import GenerationState
from jkv.decoding.speculation.draft_tokens import DraftTokens
from jkv.decoding.speculation.options import DraftModel
from jkv.decoding.speculation.verification import DRAFT
from jkv.decoding.texts.blocks import count_cached
from jkv.indexing import gather
from jkv.sharding.loops import fori_loop
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.status import Status, UsageError
from jkv.verbs.allocation import allocate
from jkv.verbs.branching import truncate

# Rows of a step that catches up with sequences, prompts included.
_ROWS = 128


class DraftRows(NamedTuple):
    """Cache of a draft model and its rows for W places."""

    cache: Cache
    seq_ids: jax.Array  # i32[W], the row of each place, -1 for none
    owners: jax.Array  # i32[W], the sequence in each row, -1 for none

    @property
    def lengths(self) -> jax.Array:
        """The tokens in the draft model's cache, i32[W]."""
        return count_cached(self.cache, self.seq_ids)


class Drafts(NamedTuple):
    """Rows of the draft model and its draft tokens with their logits."""

    rows: DraftRows
    drafted: DraftTokens
    logits: jax.Array  # f32[W, K, V], filtered logits each draft token was drawn from

    @classmethod
    def none(cls, rows: DraftRows, num_tokens: int, vocabulary: int) -> "Drafts":
        """Return no draft tokens, with rows of an earlier call."""
        num_places = rows.seq_ids.shape[0]
        return cls(
            rows=rows,
            drafted=DraftTokens.none(num_places, num_tokens),
            logits=jnp.zeros((num_places, num_tokens, vocabulary), jnp.float32),
        )


def open_rows(options: DraftModel, state: GenerationState) -> DraftRows:
    """Allocate a row of the draft model's cache for each place."""
    if options.cache.pools is not None:
        raise UsageError(
            f"DraftModel.cache has a pool for each rank of mesh axis "
            f"{options.cache.pools.axis!r}; make it without pools=, on the whole mesh: "
            f"each rank drafts in a copy of its own"
        )
    num_places, vocabulary = state.seen.shape
    runner = Runner(options.model, options.params)
    drawn = runner.count_vocabulary(options.cache, num_places)
    if drawn != vocabulary:
        raise UsageError(
            f"the draft model must have the model's vocabulary of {vocabulary} tokens, "
            f"got logits for {drawn}"
        )
    cache, opened = allocate(options.cache, jnp.zeros((num_places,), jnp.int32))
    none = jnp.full((num_places,), NO_SEQUENCE, jnp.int32)
    return DraftRows(cache=cache, seq_ids=opened.seq_ids, owners=none)


def draft(
    options: DraftModel,  # the draft model
    drafts: Drafts,  # its rows
    state: GenerationState,
    lengths: jax.Array,  # i32[W], tokens of each sequence
    is_ready: jax.Array,  # bool[W], sequences to draft for
    choice: Choice,  # of N sequences
) -> Drafts:
    rows, runner = drafts.rows, Runner(options.model, options.params)
    # Clear the rows of sequences that left their places.
    owners = jnp.where(is_ready, state.places.sequences, NO_SEQUENCE)
    stays = is_ready & (owners == rows.owners)
    rows = _cut_rows(rows, jnp.where(stays, rows.lengths, 0))._replace(owners=owners)
    is_ready = is_ready & (rows.seq_ids >= 0)
    rows, is_ready = _catch_up(runner, rows, state, lengths, is_ready)
    missing = jnp.where(is_ready, lengths - rows.lengths, 0)
    return _run_ahead(runner, drafts._replace(rows=rows), state, choice, missing)


def keep_accepted(drafts: Drafts, lengths: jax.Array, accepted: jax.Array) -> Drafts:
    """Truncate rows to the accepted tokens: `lengths` + `accepted`, i32[W] each."""
    rows = drafts.rows
    kept = jnp.minimum(rows.lengths, lengths + accepted)
    return drafts._replace(rows=_cut_rows(rows, kept))


def _cut_rows(rows: DraftRows, lengths: jax.Array) -> DraftRows:
    """Truncate rows to lengths, i32[W]."""
    is_cut = lengths < rows.lengths
    seq_ids = jnp.where(is_cut, rows.seq_ids, NO_SEQUENCE)
    cache, _ = truncate(rows.cache, seq_ids, lengths)
    return rows._replace(cache=cache)


def _catch_up(
    runner: Runner,
    rows: DraftRows,
    state: GenerationState,
    lengths: jax.Array,
    is_ready: jax.Array,
) -> tuple[DraftRows, jax.Array]:  # bool[W]: still ready; others lack blocks
    """Compute the tokens each row lacks, except the last one or two."""

    def count_left(is_ready: jax.Array, done: jax.Array) -> jax.Array:
        missing = lengths - done
        return jnp.where(is_ready & (missing > 2), missing - 1, 0)

    def note(_: Cache, is_ready: jax.Array, chunk: Chunk) -> jax.Array:
        return is_ready & (chunk.batch.status == Status.OK)

    cache, is_ready = run_chunks(
        runner,
        rows.cache,
        Unread(rows.seq_ids, state.tokens_at, commits=False),
        is_ready,
        ChunkSizes(max(_ROWS, is_ready.shape[0]), state.places.ages),
        count_left=count_left,
        note=note,
    )
    return rows._replace(cache=cache), is_ready


def _run_ahead(
    runner: Runner,
    drafts: Drafts,
    state: GenerationState,
    choice: Choice,
    missing: jax.Array,  # i32[W], the last one or two tokens to compute
) -> Drafts:
    """Draft K tokens for each sequence, one after the other."""
    rows = drafts.rows
    sequences, made = state.places.sequences, state.result.lengths
    chosen = sampling_of(choice.sampling, made.shape[0], sequences)
    seeds, made = by_row(chosen, sequences.shape[0]).seeds, gather(made, sequences)
    # Apply the logits processor while drafting, to avoid rejections.
    begun = state.rows_of(choice.logits_processor)
    Carry = tuple[Cache, DraftTokens, jax.Array, Any]

    def note(
        i: jax.Array,
        batch: Batch,
        logits: jax.Array,
        drafted: DraftTokens,
        kept: jax.Array,
        state: Any,
    ) -> tuple[DraftTokens, jax.Array, Any]:
        is_drafted = (batch.query_lengths > 0) & (drafted.counts == i)
        processor = begun and begun._replace(state=state)
        if processor is not None:
            logits = processor.process(logits)
            is_drafted &= ~is_nothing_left(logits)
        filtered = filter_logits(logits, chosen)
        drawn = draw(filtered, seeds, made + i, DRAFT)
        if processor is not None:
            state = processor.advance(jnp.where(is_drafted, drawn, -1)).state
        drafted = drafted._replace(
            tokens=drafted.tokens.at[:, i].set(drawn),
            counts=drafted.counts + is_drafted.astype(jnp.int32),
        )
        return drafted, kept.at[:, i].set(filtered), state

    pending = Unread(rows.seq_ids, state.tokens_at, commits=False)
    size = 2 * missing.shape[0]
    cache, batch, logits = run_chunk(
        runner, rows.cache, pending, rows.lengths, missing, size
    )
    nothing = DraftTokens.none(*drafts.drafted.tokens.shape)
    drafted, kept, processor_state = note(
        jnp.int32(0), batch, logits, nothing, drafts.logits, begun and begun.state
    )

    has_states = rows.cache.metadata.has_states

    def trip(i: jax.Array, carry: Carry) -> Carry:
        cache, drafted, kept, state = carry
        seq_ids = jnp.where(drafted.counts == i, rows.seq_ids, NO_SEQUENCE)
        tokens = drafted.tokens[:, i - 1]
        cache, batch, logits = runner.run(
            cache, seq_ids, tokens, commits=False, num_pending=i if has_states else 0
        )
        return cache, *note(i, batch, logits, drafted, kept, state)

    cache, drafted, kept, _ = fori_loop(
        jnp.int32(1),
        jnp.int32(drafts.drafted.tokens.shape[1]),
        trip,
        (cache, drafted, kept, processor_state),
    )
    return Drafts(rows._replace(cache=cache), drafted, kept)

"""Beam search in one jit: prompts computed once, beams that branch and end.

Searches run in step, each beam with as many new tokens as the others. Where the cache
has no room for all of them the last ones wait and begin when the others have ended: an
outer loop over these rounds, and in it one loop over prompts and one over steps. A
fifth of the file is what `beam_search` says of its arguments.

Symbols: Q prompts, K beams of each, P most prompt tokens, G most new tokens, V tokens
in the vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.beams.branches import (
    count_blocks,
    follow_parents,
    fork_prompts,
    free_beams,
    let_last_wait,
    make_room_for_beams,
    make_room_for_forks,
    open_prompts,
)
from jkv.decoding.beams.hypotheses import (
    NO_SCORE,
    Beams,
    EarlyStopping,
    Hypotheses,
    Rules,
    choose_running,
    keep_ended,
    may_improve,
    rank_continuations,
)
from jkv.decoding.beams.progress import BeamSearch, SearchState
from jkv.decoding.beginning import find_vocabulary
from jkv.decoding.conditions import when
from jkv.decoding.ending import Bounds, find_first, judge_prompts
from jkv.decoding.model import Model, call_model
from jkv.decoding.options import check_counts
from jkv.decoding.prefilling import compute_prompts, count_left, count_rows
from jkv.decoding.progress import count_free_blocks, find_block_size
from jkv.decoding.prompts import Prompts
from jkv.decoding.results import FinishReason
from jkv.decoding.scheduling.demand import BlockSize
from jkv.decoding.windows import CHUNK_SIZE
from jkv.metadata.requests import Integers, Texts
from jkv.metadata.xla_cpu import divide
from jkv.sharding.loops import while_loop
from jkv.state import Cache
from jkv.state.entry import takes_cache
from jkv.status import UsageError
from jkv.verbs.appending import append
from jkv.verbs.prefixes import commit

Carry = tuple[Cache, SearchState, jax.Array]


class Searcher(NamedTuple):
    """What does not change during a call."""

    model: Model
    params: Any
    rules: Rules
    chunk_size: int
    vocabulary: int
    size: BlockSize  # how many blocks a prompt takes while it is computed


@takes_cache(argument=2)
def beam_search(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: Texts,  # i32[B, P]
    *,
    num_beams: int,
    max_new_tokens: int,
    stop_tokens: Integers = (),  # i32[E]
    length_penalty: jax.Array | float = 1.0,
    early_stopping: EarlyStopping = False,
    num_return: int = 1,
    chunk_size: int = CHUNK_SIZE,
    salts: Integers = 0,
) -> tuple[Cache, BeamSearch]:
    """Find the most likely continuations of B prompts by beam search, and free them.

    Texts and scores are those of `generate(num_beams=...)` in Hugging Face
    transformers: a text's score is the sum of its log-probabilities, divided by its
    number of new tokens to the power of `length_penalty`. A prompt is computed once,
    and its beams share what they have in common; only those that branch copy a partly
    filled block. Jit it with the cache donated, or every call copies the pool::

        beam_search = jax.jit(
            jkv.beam_search,
            static_argnames=(
                "model", "num_beams", "max_new_tokens", "early_stopping", "num_return",
                "chunk_size",
            ),
            donate_argnames="cache",
        )

    When blocks or rows run out, the search of the last prompt gives its own back and
    waits until the others have ended, then begins anew. So a search ends with
    OUT_OF_BLOCKS or OUT_OF_SEQUENCES only if it would not fit alone, and returns the
    best texts of that moment.

    Args:
      model: see `Model`; hashable, as it is static under jit.
      params: the model's weights.
      cache: may hold other sequences, which stay as they are.
      prompts: i32[B, P], -1 after each prompt's end, or a list of token ids for each;
        one that is empty is not begun.
      num_beams: texts of each prompt that run at one time, K; one is greedy search.
        Static.
      max_new_tokens: most new tokens of any text, G; static.
      stop_tokens: i32[E], tokens that end a text; they are kept in the result.
      length_penalty: f32[] or float; above 0 it favours long texts, below short ones.
      early_stopping: when a search with K texts that have ended stops: True at once;
        False when the best beam, at its length, scores no better than the worst of
        them; "never" like False, but a beam may have G tokens if the length penalty is
        above 0. Static.
      num_return: texts of each prompt that are returned, at most K; static.
      chunk_size: rows of a step that computes prompts; static.
      salts: i32[B] or int, domains of the prefix cache, if the cache has one.

    Returns:
      The cache, all sequences of this call freed, and a `BeamSearch`. A search ends by
      STOP when it has found its texts, by LENGTH or CONTEXT_FULL when its beams could
      not be longer.

    Raises:
      ValueError: for arguments of a wrong shape, type or size, or a model whose logits
        are not [B, V], when it is traced.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> table = (2.0 * jnp.eye(10, k=1)).at[:, 9].add(1.0)
      >>> def spell(params, tokens, cache, batch):
      ...     return table[tokens][batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=4, max_context_length=16))
      >>> cache, found = jkv.beam_search(spell, None, cache, [[1, 2]], num_beams=2,
      ...     max_new_tokens=4, stop_tokens=[9], num_return=2)
      >>> found.tokens.tolist()
      [[[3, 4, 5, 6], [3, 4, 5, 9]]]
    """
    check_counts(
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        num_return=num_return,
        chunk_size=chunk_size,
    )
    rules = _make_rules(
        num_beams, max_new_tokens, stop_tokens, length_penalty, early_stopping
    )
    if num_return > num_beams:
        raise UsageError(
            f"num_return must be at most num_beams, as a search keeps so many texts; "
            f"got {num_return} of {num_beams}"
        )
    texts = Prompts.of(prompts, limits=None, max_new_tokens=max_new_tokens, salts=salts)
    size = find_block_size(cache, (count_rows(texts, chunk_size),))
    bounds = Bounds(cache.max_context_length, size, count_free_blocks(cache))
    state = SearchState.begin(
        texts, judge_prompts(texts, bounds), num_beams, max_new_tokens
    )
    num_rows = texts.lengths.shape[0] * num_beams
    vocabulary = find_vocabulary(model, params, cache, num_rows)
    searcher = Searcher(model, params, rules, chunk_size, vocabulary, size)
    cache, state = while_loop(
        lambda carry: jnp.any(carry[1].is_open),
        lambda carry: _run_round(searcher, *carry),
        (cache, state),
    )
    found = state.hypotheses
    return cache, BeamSearch(
        tokens=found.tokens[:, :num_return],
        lengths=found.lengths[:, :num_return],
        scores=found.scores[:, :num_return],
        reasons=state.reasons,
        statistics=state.statistics,
    )


def _make_rules(
    num_beams: int,
    max_new_tokens: int,
    stop_tokens: Integers,
    length_penalty: jax.Array | float,
    early_stopping: EarlyStopping,
) -> Rules:
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise UsageError(
            f'early_stopping must be True, False or "never", got {early_stopping!r}'
        )
    stops = jnp.asarray(stop_tokens, jnp.int32)
    if stops.ndim > 1:
        raise UsageError(
            f"stop_tokens must be i32[E], the same for all prompts, got shape "
            f"{list(stops.shape)}"
        )
    penalty = jnp.asarray(length_penalty, jnp.float32)
    if penalty.ndim:
        raise UsageError(
            f"length_penalty must be one number, got shape {list(penalty.shape)}"
        )
    # One beam is greedy search: its first text that ends is the one.
    stops_at_once = True if num_beams == 1 else early_stopping
    return Rules(num_beams, max_new_tokens, stops.reshape(-1), penalty, stops_at_once)


def _run_round(
    searcher: Searcher, cache: Cache, state: SearchState
) -> tuple[Cache, SearchState]:
    """Run the searches that find room, from their prompts to their end."""
    cache, state = open_prompts(cache, _begin_anew(state), searcher.size)
    shape = *state.reasons.shape, searcher.vocabulary
    carry = cache, state, jnp.zeros(shape, jnp.float32)
    if searcher.size.is_reserved:
        cache, state, logits = _compute_prompts(searcher, *carry)
    else:
        cache, state, logits = _compute_prompts_that_fit(searcher, *carry)
    cache, state = fork_prompts(cache, state)
    state = count_blocks(cache, state)
    # Beams that have no token yet agree: the first one alone counts.
    logits = jnp.repeat(logits, state.num_beams, axis=0)
    cache, state, _ = while_loop(
        lambda carry: jnp.any(carry[1].is_running),
        lambda carry: _run_step(searcher, *carry),
        (cache, state, logits),
    )
    return cache, state


def _compute_prompts(
    searcher: Searcher, cache: Cache, state: SearchState, logits: jax.Array
) -> Carry:
    """Compute the prompts of searches, as far as blocks reach; f32[Q, V], logits."""
    cache, logits, num_steps = compute_prompts(
        searcher.model,
        searcher.params,
        cache,
        state.prompts,
        state.first_seq_ids,
        chunk_size=searcher.chunk_size,
        logits=logits,
    )
    return cache, state.count(num_steps=num_steps), logits


def _compute_prompts_that_fit(
    searcher: Searcher, cache: Cache, state: SearchState, logits: jax.Array
) -> Carry:
    """Compute prompts of which not all is reserved; let the last wait if blocks lack.

    Blocks that a window gives back are counted on, and others may still share them.
    """

    def lacks(cache: Cache, state: SearchState) -> jax.Array:
        left = count_left(cache, state.prompts, state.first_seq_ids)
        return jnp.any(left > 0)

    def let_wait(carry: tuple[Cache, SearchState]) -> tuple[Cache, SearchState]:
        cache, state, lacking = let_last_wait(*carry, jnp.zeros((), bool))
        return cache, state.end(lacking != FinishReason.RUNNING, lacking)

    def trip(carry: Carry) -> Carry:
        cache, state, logits = _compute_prompts(searcher, *carry)
        cache, state = when(lacks(cache, state), let_wait, (cache, state))
        return cache, state, logits

    cache, state, logits = while_loop(
        lambda carry: lacks(*carry[:2]), trip, (cache, state, logits)
    )
    none = tuple(jnp.zeros_like(state.reasons) for _ in cache.metadata.groups)
    return *make_room_for_forks(cache, state, none), logits


def _begin_anew(state: SearchState) -> SearchState:
    """Let searches that have waited begin with nothing."""
    sizes = state.beams.tokens.shape
    return dataclasses.replace(
        state,
        beams=Beams.fresh(*sizes),
        hypotheses=_where(state.is_open, Hypotheses.none(*sizes), state.hypotheses),
        length=jnp.zeros((), jnp.int32),
    )


def _run_step(
    searcher: Searcher, cache: Cache, state: SearchState, logits: jax.Array
) -> Carry:
    """Give each beam one more token, and compute it.

    Args:
      searcher: what does not change.
      cache: the cache.
      state: the searches.
      logits: f32[Q * K, V], after each beam's last token.
    """
    before = state
    state, parents, reasons = _choose_beams(searcher.rules, cache, state, logits)
    ends = reasons != FinishReason.RUNNING
    cache = free_beams(cache, before, ends & before.is_running)
    state = state.end(ends, reasons)
    cache, state = follow_parents(cache, state, parents)

    # All beams of a prompt have the same length, so all or none need a block.
    _, tail = divide(state.prompts.lengths + state.length - 1, cache.block_size)
    needs = jnp.where(tail == 0, jnp.int32(state.num_beams), 0)
    cache, state, lacking = make_room_for_beams(
        cache, state, (needs,) * len(cache.metadata.groups), jnp.zeros_like(needs)
    )
    lacks = lacking != FinishReason.RUNNING
    state = _count_beams_as_they_are(searcher.rules, state, lacks).end(lacks, lacking)
    return when(
        jnp.any(state.is_running),
        lambda carry: _compute_beams(searcher, *carry),
        (cache, state, logits),
    )


def _choose_beams(
    rules: Rules, cache: Cache, state: SearchState, logits: jax.Array
) -> tuple[SearchState, jax.Array, jax.Array]:
    """Choose the next tokens, and what has ended with them.

    Returns:
      The state, with one more token in each beam; i32[Q, K], the parents of its beams;
      and i32[Q], why searches end, RUNNING where they go on.
    """
    shape = *state.seq_ids.shape, logits.shape[1]
    logprobs = jax.nn.log_softmax(logits).reshape(shape)
    # Without numbers there is no token: the search ends with the beams that it had.
    is_nan = jnp.any(jnp.isnan(logprobs), axis=(1, 2)) & state.is_running
    state = _count_beams_as_they_are(rules, state, is_nan)
    found = rank_continuations(
        jnp.where(is_nan[:, None, None], jnp.float32(NO_SCORE), logprobs),
        state.beams.scores,
        rules.num_candidates,
    )

    length = state.length + 1
    is_past_context = state.prompts.lengths + length > cache.max_context_length
    is_last = is_past_context | (length >= rules.max_new_tokens)
    is_stop = jnp.any(found.tokens[:, :, None] == rules.stop_tokens[None, None], axis=2)
    is_final = is_stop | is_last[:, None]

    ended = keep_ended(state.hypotheses, state.beams, found, is_final, length, rules)
    hypotheses = _where(state.is_running & ~is_nan, ended, state.hypotheses)
    running = choose_running(found, is_final, state.num_beams)
    improves = may_improve(hypotheses, running.scores[:, 0], length, rules)
    reasons = find_first(
        is_nan.shape,
        [
            (FinishReason.NAN_LOGITS, is_nan),
            (FinishReason.STOP, ~improves & ~is_last),
            (FinishReason.LENGTH, is_last & ~is_past_context),
            (FinishReason.CONTEXT_FULL, is_last),
        ],
    )
    state = dataclasses.replace(
        state,
        beams=state.beams.choose(running, length),
        hypotheses=hypotheses,
        length=length,
    )
    reasons = jnp.where(state.is_running, reasons, jnp.int32(FinishReason.RUNNING))
    return state, running.parents, reasons


def _compute_beams(
    searcher: Searcher, cache: Cache, state: SearchState, logits: jax.Array
) -> Carry:
    """Compute the newest token of each beam; the old logits are f32[Q * K, V]."""
    tokens = state.beams.tokens[:, :, state.length - 1].reshape(-1)
    tokens = jnp.maximum(tokens, 0)
    cache, batch = append(cache, state.flat_seq_ids, tokens=tokens)
    logits, cache = call_model(searcher.model, searcher.params, tokens, cache, batch)
    cache = commit(cache, batch)
    state = count_blocks(cache, state.count(num_steps=jnp.int32(1)))
    return cache, state, logits.astype(jnp.float32)


def _count_beams_as_they_are(
    rules: Rules, state: SearchState, ends: jax.Array
) -> SearchState:
    """Let beams of searches that end, bool[Q], count as texts that have ended."""
    length = state.length
    scores = rules.penalise(state.beams.scores, jnp.maximum(length, 1))
    counts = ends[:, None] & (length > 0)
    hypotheses = state.hypotheses.add(
        state.beams.tokens, jnp.where(counts, scores, jnp.float32(NO_SCORE)), length
    )
    return dataclasses.replace(
        state, hypotheses=_where(ends, hypotheses, state.hypotheses)
    )


def _where(mask: jax.Array, new: Hypotheses, old: Hypotheses) -> Hypotheses:
    """Return the new ones of prompts in the mask, bool[Q], the old ones of others."""

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return jax.tree.map(pick, new, old)

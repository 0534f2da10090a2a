"""Whole generations inside one jit: prompts in chunks, then one token a step.

Both phases are a `lax.while_loop` around the verbs a user would call: `append` takes
the blocks that the step's tokens need, the model writes and attends, and a sequence
that has ended is freed in the same step, so that its blocks serve others in the next.

A sequence that is refused a block waits while any other goes on, for that one may end
and return its blocks. Only when none can go on does one of them end, the last in the
batch: earlier sequences keep their place. Prompts wait for nothing: the first that does
not fit beside those before it ends at once.

Symbols: B sequences, P most prompt tokens, R rows of a prompt chunk, G most new tokens,
V tokens in the vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.decoding.model import Model
from jkv.decoding.results import FinishReason, Generation, GenerationState, Statistics
from jkv.decoding.sampling import GREEDY, Sampling, sample
from jkv.metadata.requests import Integers
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.status import Status
from jkv.verbs.allocation import Allocation, allocate, free
from jkv.verbs.appending import append
from jkv.verbs.forking import fork
from jkv.verbs.lookups import num_free_blocks
from jkv.verbs.prefixes import commit

# Rows of a prompt chunk when the caller does not say: enough to keep a processor busy,
# few enough that the chunk's activations stay small.
CHUNK_SIZE = 512

# Refusals of the cache that end a sequence. No other status can occur here.
_REASONS = {
    Status.CONTEXT_FULL: FinishReason.CONTEXT_FULL,
    Status.OUT_OF_BLOCKS: FinishReason.OUT_OF_BLOCKS,
    Status.OUT_OF_SEQUENCES: FinishReason.OUT_OF_SEQUENCES,
    Status.INVALID_SEQUENCE: FinishReason.CANCELLED,
}


def generate(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: jax.Array,  # i32[B, P]
    *,
    max_new_tokens: int,
    limits: jax.Array | None = None,  # i32[B]
    stop_tokens: jax.Array | Sequence[int] = (),  # i32[E]
    sampling: Sampling = GREEDY,
    num_samples: int = 1,
    chunk_size: int = CHUNK_SIZE,
    salts: Integers = 0,
) -> tuple[Cache, Generation]:
    """Continue B prompts until each has ended, and free them.

    Nothing in here depends on values: one trace serves all prompts, limits, stop tokens
    and sampling parameters of the same shapes. Jit it with the cache donated, or every
    call copies the pool::

        generate = jax.jit(
            jkv.generate,
            static_argnames=("model", "max_new_tokens", "num_samples", "chunk_size"),
            donate_argnames="cache",
        )

    Sequences take blocks as they grow. Running out of blocks, of rows or of context
    ends a sequence with a reason and leaves the others alone. With enough blocks, a
    sequence's tokens do not depend on which others are in the batch.

    Args:
      model: see `Model`; hashable, as it is static under jit.
      params: the model's weights.
      cache: may hold other sequences, which stay as they are.
      prompts: i32[B, P], -1 after each prompt's end; one that is empty is not begun.
      max_new_tokens: most new tokens of any sequence, G; static.
      limits: i32[B], most new tokens of each, at most G; None is G for all.
      stop_tokens: i32[E], tokens that end a sequence; they are kept in the result.
      sampling: how tokens are chosen, one number or B * num_samples; greedy by default.
      num_samples: continuations of each prompt, which share its blocks (`fork`);
        static. Sample j of prompt i is sequence `i * num_samples + j` of the result.
      chunk_size: rows of a prompt chunk, R; static. B * P are used where that is less.
        Each chunk costs all of its rows: take few where the prefix cache leaves few.
      salts: i32[B] or int, domains of the prefix cache, if the cache has one: what
        earlier prompts of a domain left behind is not computed again.

    Returns:
      The cache, all sequences of this call freed, and a `Generation`.

    Raises:
      ValueError: for arguments of a wrong shape or type.

    Example:
      >>> import jax, jax.numpy as jnp, jkv
      >>> def count_on(params, tokens, cache, batch, *, all_rows=False):
      ...     logits = jax.nn.one_hot(tokens + 1, 100)
      ...     return (logits if all_rows else logits[batch.last_rows]), cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16))
      >>> cache, result = jkv.generate(count_on, None, cache,
      ...     jnp.array([[5, 6, 7], [40, -1, -1]]), max_new_tokens=4, stop_tokens=[9])
      >>> result.tokens.tolist()
      [[8, 9, -1, -1], [41, 42, 43, 44]]
      >>> [jkv.FinishReason(reason).name for reason in result.reasons.tolist()]
      ['STOP', 'LENGTH']
    """
    cache, state = prefill(
        model,
        params,
        cache,
        prompts,
        max_new_tokens=max_new_tokens,
        limits=limits,
        stop_tokens=stop_tokens,
        sampling=sampling,
        num_samples=num_samples,
        chunk_size=chunk_size,
        salts=salts,
    )
    cache, state = decode(model, params, cache, state, sampling=sampling)
    return cache, state.result


def prefill(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: jax.Array,  # i32[B, P]
    *,
    max_new_tokens: int,
    limits: jax.Array | None = None,  # i32[B]
    stop_tokens: jax.Array | Sequence[int] = (),  # i32[E]
    sampling: Sampling = GREEDY,
    num_samples: int = 1,
    chunk_size: int = CHUNK_SIZE,
    salts: Integers = 0,
) -> tuple[Cache, GenerationState]:
    """Put B prompts in the cache and choose the first new token of each.

    The first half of `generate`, for callers that look at the tokens between steps. The
    sequences stay open until `decode` ends them. To end one before, free its id in
    `state.seq_ids` with `jkv.free`: the next `decode` finds it gone and calls it
    CANCELLED. All of them at once: `jkv.free(cache, state.seq_ids)`.

    Args:
      model, params, cache, prompts, max_new_tokens, limits, stop_tokens, sampling,
        num_samples, chunk_size, salts: as for `generate`.

    Returns:
      The cache, and the state that `decode` goes on from.
    """
    _check_prompts(prompts)
    _check_counts(
        max_new_tokens=max_new_tokens, num_samples=num_samples, chunk_size=chunk_size
    )
    num_prompts, width = prompts.shape
    num_rows = max(1, min(num_prompts * width, chunk_size))
    if limits is None:
        limits = jnp.full((num_prompts,), max_new_tokens, jnp.int32)
    limits = jnp.minimum(jnp.asarray(limits, jnp.int32), max_new_tokens)
    if limits.shape != (num_prompts,):
        raise ValueError(
            f"limits must be i32[{num_prompts}], one for each prompt, got "
            f"i32{list(limits.shape)}"
        )

    # The prompts whose fate is known before they begin.
    prompts = prompts.astype(jnp.int32)
    lengths = _prompt_lengths(prompts)
    reasons = jnp.full((num_prompts,), FinishReason.RUNNING, jnp.int32)
    for reason, applies in (
        (FinishReason.CONTEXT_FULL, lengths > cache.max_context_length),
        (FinishReason.LENGTH, limits <= 0),
        (FinishReason.EMPTY_PROMPT, lengths == 0),
    ):
        reasons = jnp.where(applies, jnp.int32(reason), reasons)

    begins = reasons == FinishReason.RUNNING
    no_tokens = jnp.where(begins, 0, NO_SEQUENCE)
    cache, opened = allocate(cache, no_tokens, tokens=prompts, salts=salts)
    reasons = _add_reasons(reasons, opened.status)

    cache, prompted = _run_prompts(
        model, params, cache, prompts, lengths, opened, reasons, num_rows
    )
    cache, prompted = _fork_samples(cache, prompted, num_samples)
    return _first_tokens(
        cache,
        prompted,
        jnp.repeat(prompts, num_samples, axis=0),
        limits=jnp.repeat(limits, num_samples),
        max_new_tokens=max_new_tokens,
        stop_tokens=jnp.asarray(stop_tokens, jnp.int32).reshape(-1),
        sampling=sampling,
    )


def decode(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    *,
    sampling: Sampling = GREEDY,
    num_steps: jax.Array | int | None = None,
) -> tuple[Cache, GenerationState]:
    """Generate on, one token a step for each running sequence.

    Args:
      model, params: as for `prefill`.
      cache, state: from `prefill`, or from an earlier `decode`; jit may donate both.
      sampling: as for `prefill`.
      num_steps: steps to do at most, may be traced; None goes on until all have ended.

    Returns:
      The cache and the state. `state.is_running` says which sequences go on; those that
      have ended are freed, and `state.result` has their tokens.

    Example:
      A host that shows tokens as they come::

          decode = jax.jit(
              jkv.decoding.decode,
              static_argnames="model",
              donate_argnames=("cache", "state"),
          )
          while state.is_running.any():
              cache, state = decode(model, params, cache, state, num_steps=4)
              show(state.result.tokens)
    """
    if num_steps is None:
        num_steps = jnp.iinfo(jnp.int32).max
    steps_left = jnp.asarray(num_steps, jnp.int32)

    def goes_on(carry: tuple[jax.Array, Cache, GenerationState]) -> jax.Array:
        steps_left, _, state = carry
        return (steps_left > 0) & jnp.any(state.is_running)

    def step(
        carry: tuple[jax.Array, Cache, GenerationState],
    ) -> tuple[jax.Array, Cache, GenerationState]:
        steps_left, cache, state = carry
        cache, state = _decode_step(model, params, cache, state, sampling)
        return steps_left - 1, cache, state

    _, cache, state = lax.while_loop(goes_on, step, (steps_left, cache, state))
    return cache, state


class _Prompted(NamedTuple):
    """Carry of the prompts' loop."""

    seq_ids: jax.Array  # i32[B], -1 where a prompt has ended
    reasons: jax.Array  # i32[B], `FinishReason`
    num_done: jax.Array  # i32[B], tokens of each prompt in the cache
    logits: jax.Array  # f32[B, V], after each prompt's last token
    statistics: Statistics


def _run_prompts(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: jax.Array,
    lengths: jax.Array,
    opened: Allocation,
    reasons: jax.Array,
    num_rows: int,
) -> tuple[Cache, _Prompted]:
    """Append the prompts, first come first served, `num_rows` tokens at a time."""

    def remaining(prompted: _Prompted) -> jax.Array:
        is_open = prompted.seq_ids >= 0
        return jnp.where(is_open, lengths - prompted.num_done, 0)

    def append_chunk(
        cache: Cache, prompted: _Prompted
    ) -> tuple[jax.Array, Cache, Batch]:
        # Each prompt's part of the rows is what those before it leave.
        left = remaining(prompted)
        starts = jnp.cumsum(left, dtype=jnp.int32) - left
        count = jnp.clip(num_rows - starts, 0, left)
        row = jnp.arange(num_rows, dtype=jnp.int32)
        ends = jnp.cumsum(count, dtype=jnp.int32)
        owner = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
        column = row + (prompted.num_done - (ends - count)).at[owner].get(mode="clip")
        tokens = prompts.at[owner, column].get(mode="fill", fill_value=0)
        seq_ids = jnp.where(count > 0, prompted.seq_ids, NO_SEQUENCE)
        cache, batch = append(cache, seq_ids, count, capacity=num_rows, tokens=tokens)
        return tokens, cache, batch

    def step(carry: tuple[Cache, _Prompted]) -> tuple[Cache, _Prompted]:
        cache, prompted = carry
        tokens, cache, batch = append_chunk(cache, prompted)
        logits, cache = model(params, tokens, cache, batch)
        cache = commit(cache, batch)

        num_done = prompted.num_done + batch.query_lengths
        is_done = (num_done == lengths) & (batch.query_lengths > 0)
        # The first prompt that does not fit never will, for those before it keep what
        # they have. Those behind it were refused with it and try again.
        ends = _is_first(batch.status == Status.OUT_OF_BLOCKS)
        reasons = _add_reasons(prompted.reasons, _unless_waiting(batch.status, ends))
        statistics = _count_step(prompted.statistics, cache, num_done)
        cache, seq_ids = _free_ended(cache, prompted.seq_ids, reasons)
        return cache, _Prompted(
            seq_ids=seq_ids,
            reasons=reasons,
            num_done=jnp.where(seq_ids >= 0, num_done, 0),
            logits=jnp.where(
                is_done[:, None], logits.astype(jnp.float32), prompted.logits
            ),
            statistics=statistics,
        )

    # The model's own shapes say how large the vocabulary is.
    no_work = jnp.zeros_like(lengths)
    blank = _Prompted(opened.seq_ids, reasons, no_work, no_work, _statistics(opened))
    logits, _ = jax.eval_shape(
        lambda cache, blank: model(params, *append_chunk(cache, blank)), cache, blank
    )
    prompted = blank._replace(
        num_done=opened.num_cached, logits=jnp.zeros(logits.shape, jnp.float32)
    )
    return lax.while_loop(
        lambda carry: jnp.any(remaining(carry[1]) > 0), step, (cache, prompted)
    )


def _fork_samples(
    cache: Cache, prompted: _Prompted, num_samples: int
) -> tuple[Cache, _Prompted]:
    """Open `num_samples - 1` more sequences on each prompt, which share its blocks."""
    if num_samples == 1:
        return cache, prompted

    def repeat(array: jax.Array) -> jax.Array:
        return jnp.repeat(array, num_samples, axis=0)

    is_first = jnp.arange(repeat(prompted.seq_ids).shape[0]) % num_samples == 0
    parents = repeat(prompted.seq_ids)
    cache, forked = fork(cache, jnp.where(is_first, NO_SEQUENCE, parents))
    return cache, prompted._replace(
        seq_ids=jnp.where(is_first, parents, forked.seq_ids),
        reasons=_add_reasons(repeat(prompted.reasons), forked.status),
        num_done=repeat(prompted.num_done),
        logits=repeat(prompted.logits),
    )


def _first_tokens(
    cache: Cache,
    prompted: _Prompted,
    prompts: jax.Array,
    *,
    limits: jax.Array,
    max_new_tokens: int,
    stop_tokens: jax.Array,
    sampling: Sampling,
) -> tuple[Cache, GenerationState]:
    """Begin the state: nothing generated, then one token from the prompts' logits."""
    num_sequences, vocabulary = prompted.logits.shape
    row = jnp.arange(num_sequences, dtype=jnp.int32)[:, None]
    token = jnp.where(prompts < 0, vocabulary, prompts)
    shape = (num_sequences, max_new_tokens)
    state = GenerationState(
        result=Generation(
            tokens=jnp.full(shape, -1, jnp.int32),
            lengths=jnp.zeros((num_sequences,), jnp.int32),
            reasons=prompted.reasons,
            logprobs=jnp.zeros(shape, jnp.float32),
            statistics=prompted.statistics,
        ),
        seq_ids=prompted.seq_ids,
        limits=limits,
        stop_tokens=stop_tokens,
        seen=jnp.zeros((num_sequences, vocabulary), bool)
        .at[row, token]
        .set(True, mode="drop"),
    )
    return _choose_tokens(cache, state, prompted.logits, state.is_running, sampling)


def _decode_step(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    sampling: Sampling,
) -> tuple[Cache, GenerationState]:
    """Put the last token of each sequence in the cache and choose the next."""
    tokens = state.last_tokens
    cache, batch = append(cache, state.seq_ids, tokens=tokens)
    logits, cache = model(params, tokens, cache, batch)
    cache = commit(cache, batch)
    # While any sequence goes on, or ends, those without a block wait for its own.
    refused = batch.status == Status.OUT_OF_BLOCKS
    none_moves = ~jnp.any(state.is_running & ~refused)
    ends = jnp.flip(_is_first(jnp.flip(refused))) & none_moves
    status = _unless_waiting(batch.status, ends)
    result = state.result._replace(
        reasons=_add_reasons(state.result.reasons, status),
        statistics=_count_step(state.result.statistics, cache, batch.context_lengths),
    )
    state = dataclasses.replace(state, result=result)
    return _choose_tokens(cache, state, logits, batch.query_lengths > 0, sampling)


def _choose_tokens(
    cache: Cache,
    state: GenerationState,
    logits: jax.Array,  # f32[B, V]
    served: jax.Array,  # bool[B], the others wait or have ended
    sampling: Sampling,
) -> tuple[Cache, GenerationState]:
    """Record one more token of each served sequence, and free those that have ended."""
    result = state.result
    tokens, logprobs = sample(logits, sampling, result.lengths, seen=state.seen)
    row = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    column = jnp.where(served, result.lengths, result.tokens.shape[1])
    lengths = result.lengths + served.astype(jnp.int32)

    stops = jnp.any(tokens[:, None] == state.stop_tokens[None, :], axis=1)
    reasons = result.reasons
    reasons = jnp.where(
        served & (lengths >= state.limits), jnp.int32(FinishReason.LENGTH), reasons
    )
    reasons = jnp.where(served & stops, jnp.int32(FinishReason.STOP), reasons)
    cache, seq_ids = _free_ended(cache, state.seq_ids, reasons)

    seen_token = jnp.where(served, tokens, state.seen.shape[1])
    return cache, dataclasses.replace(
        state,
        result=result._replace(
            tokens=result.tokens.at[row, column].set(tokens, mode="drop"),
            lengths=lengths,
            reasons=reasons,
            logprobs=result.logprobs.at[row, column].set(logprobs, mode="drop"),
        ),
        seq_ids=seq_ids,
        seen=state.seen.at[row, seen_token].set(True, mode="drop"),
    )


def _unless_waiting(status: jax.Array, ends: jax.Array) -> jax.Array:
    """Return the status without the refusals for want of blocks that do not end."""
    waits = (status == Status.OUT_OF_BLOCKS) & ~ends
    return jnp.where(waits, jnp.int32(Status.OK), status)


def _is_first(mask: jax.Array) -> jax.Array:
    """Return the mask with nothing left but its first entry."""
    return mask & (jnp.cumsum(mask, dtype=jnp.int32) == 1)


def _add_reasons(reasons: jax.Array, status: jax.Array) -> jax.Array:
    """Give each running sequence that was refused its reason."""
    is_running = reasons == FinishReason.RUNNING
    for refusal, reason in _REASONS.items():
        reasons = jnp.where(
            is_running & (status == refusal), jnp.int32(reason), reasons
        )
    return reasons


def _free_ended(
    cache: Cache, seq_ids: jax.Array, reasons: jax.Array
) -> tuple[Cache, jax.Array]:
    """Free the sequences that have a reason; their ids become padding."""
    ended = reasons != FinishReason.RUNNING
    cache, _ = free(cache, jnp.where(ended, seq_ids, NO_SEQUENCE))
    return cache, jnp.where(ended, NO_SEQUENCE, seq_ids)


def _statistics(opened: Allocation) -> Statistics:
    """Begin the statistics: prompts opened, nothing computed yet."""
    nothing = jnp.int32(0)
    cached = jnp.sum(opened.num_cached, dtype=jnp.int32)
    return Statistics(nothing, nothing, nothing, cached)


def _count_step(
    statistics: Statistics, cache: Cache, context_lengths: jax.Array
) -> Statistics:
    """Count a step that has appended and not yet freed."""
    used = jnp.int32(cache.num_blocks) - num_free_blocks(cache)
    empty = jnp.sum(-context_lengths % cache.block_size, dtype=jnp.int32)
    is_peak = used > statistics.peak_blocks
    return statistics._replace(
        num_steps=statistics.num_steps + 1,
        peak_blocks=jnp.where(is_peak, used, statistics.peak_blocks),
        empty_slots=jnp.where(is_peak, empty, statistics.empty_slots),
    )


def _prompt_lengths(prompts: jax.Array) -> jax.Array:
    """Return the tokens before each row's first negative entry, i32[B]."""
    is_token = jnp.cumprod((prompts >= 0).astype(jnp.int32), axis=1, dtype=jnp.int32)
    return jnp.sum(is_token, axis=1, dtype=jnp.int32)


def _check_prompts(prompts: jax.Array) -> None:
    if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
        raise ValueError(
            "prompts must be i32[B, P], one prompt a row and -1 after its end, got "
            f"{prompts.dtype}{list(prompts.shape)}"
        )


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(
                f"{name} must be a static int of at least 1, got {count!r}"
            )

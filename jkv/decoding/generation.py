"""Whole generations inside one jit: prompts in chunks, then one token a step.

Both phases are a `lax.while_loop` around the verbs a user would call. `append` takes
the blocks that the step's tokens need, and the model writes and attends. A sequence
that has ended is freed in the same step, so that its blocks serve others in the next.

A sequence that is refused a block waits while any other goes on, for that one may end
and return its blocks. When none can go on, the last in the batch ends: earlier ones
keep their place. Prompts do not wait (`jkv.decoding.prompts`).

Symbols: B sequences, P most prompt tokens, R rows of a prompt chunk, G most new tokens,
V tokens in the vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jkv.decoding.model import Model
from jkv.decoding.options import GREEDY, Sampling
from jkv.decoding.prompts import (
    Progress,
    Prompts,
    fill_limits,
    fork_samples,
    open_prompts,
    run_prompts,
)
from jkv.decoding.results import Generation, GenerationState
from jkv.decoding.step import choose_tokens, decode_step
from jkv.metadata.requests import Integer, Integers, Texts, as_index
from jkv.state import Cache
from jkv.state.entry import takes_cache

# Rows of a prompt chunk when the caller does not say: enough to keep a processor busy,
# few enough that the chunk's activations stay small.
CHUNK_SIZE = 512


@takes_cache
def generate(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: Texts,  # i32[B, P]
    *,
    max_new_tokens: int,
    limits: Integers | None = None,  # i32[B]
    stop_tokens: Integers = (),  # i32[E]
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
      prompts: i32[B, P], -1 after each prompt's end, or a list of token ids for each;
        one that is empty is not begun. Lists of other lengths compile anew.
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
      ValueError: for arguments of a wrong shape or type, when it is traced.

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


@takes_cache
def prefill(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: Texts,  # i32[B, P]
    *,
    max_new_tokens: int,
    limits: Integers | None = None,  # i32[B]
    stop_tokens: Integers = (),  # i32[E]
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
      model: as for `generate`.
      params: as for `generate`.
      cache: as for `generate`.
      prompts: as for `generate`.
      max_new_tokens: as for `generate`.
      limits: as for `generate`.
      stop_tokens: as for `generate`.
      sampling: as for `generate`.
      num_samples: as for `generate`.
      chunk_size: as for `generate`.
      salts: as for `generate`.

    Returns:
      The cache, and the state that `decode` goes on from.

    Raises:
      ValueError: for arguments of a wrong shape or type.

    Example:
      >>> import jax, jax.numpy as jnp, jkv
      >>> from jkv.decoding import prefill
      >>> def count_on(params, tokens, cache, batch, *, all_rows=False):
      ...     logits = jax.nn.one_hot(tokens + 1, 100)
      ...     return (logits if all_rows else logits[batch.last_rows]), cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16))
      >>> cache, state = prefill(
      ...     count_on, None, cache, jnp.array([[5, 6, 7]]), max_new_tokens=4)
      >>> state.result.tokens.tolist(), state.is_running.tolist()
      ([[8, -1, -1, -1]], [True])
    """
    _check_counts(
        max_new_tokens=max_new_tokens, num_samples=num_samples, chunk_size=chunk_size
    )
    todo = Prompts.of(prompts)
    num_rows = max(1, min(todo.tokens.size, chunk_size))
    limits = fill_limits(limits, todo.tokens.shape[0], max_new_tokens)
    cache, progress = open_prompts(cache, todo, limits, salts)
    cache, progress, logits = run_prompts(
        model, params, cache, todo, progress, num_rows
    )
    cache, progress = fork_samples(cache, progress, num_samples)

    # From here on each array has a row for each sample.
    texts, limits, logits = (
        jnp.repeat(each, num_samples, axis=0) for each in (todo.tokens, limits, logits)
    )
    stops = jnp.asarray(stop_tokens, jnp.int32).reshape(-1)
    state = _begin_state(progress, texts, limits, max_new_tokens, stops, logits.shape)
    return choose_tokens(cache, state, logits, state.is_running, sampling)


@takes_cache
def decode(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    *,
    sampling: Sampling = GREEDY,
    num_steps: Integer | None = None,
) -> tuple[Cache, GenerationState]:
    """Generate on, one token a step for each running sequence.

    Args:
      model: as for `prefill`.
      params: as for `prefill`.
      cache: from `prefill`, or from an earlier `decode`; jit may donate it.
      state: what came with the cache; jit may donate it, too.
      sampling: as for `prefill`.
      num_steps: steps to do at most, may be traced; None goes on until all have ended.

    Returns:
      The cache and the state. `state.is_running` says which sequences go on; those that
      have ended are freed, and `state.result` has their tokens.

    Raises:
      ValueError: for `Sampling` fields of a wrong shape.

    Example:
      A host that shows tokens as they come, two steps at a time. For speed it jits
      `decode` with `static_argnames="model"` and donates `cache` and `state`:

      >>> import jax, jax.numpy as jnp, jkv
      >>> from jkv.decoding import decode, prefill
      >>> def count_on(params, tokens, cache, batch, *, all_rows=False):
      ...     logits = jax.nn.one_hot(tokens + 1, 100)
      ...     return (logits if all_rows else logits[batch.last_rows]), cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16))
      >>> cache, state = prefill(
      ...     count_on, None, cache, jnp.array([[5, 6, 7]]), max_new_tokens=4)
      >>> while state.is_running.any():
      ...     cache, state = decode(count_on, None, cache, state, num_steps=2)
      ...     print(state.result.tokens.tolist())
      [[8, 9, 10, -1]]
      [[8, 9, 10, 11]]
    """
    if num_steps is None:
        num_steps = jnp.iinfo(jnp.int32).max
    steps_left = jnp.asarray(as_index(num_steps))

    def goes_on(carry: tuple[jax.Array, Cache, GenerationState]) -> jax.Array:
        steps_left, _, state = carry
        return (steps_left > 0) & jnp.any(state.is_running)

    def step(
        carry: tuple[jax.Array, Cache, GenerationState],
    ) -> tuple[jax.Array, Cache, GenerationState]:
        steps_left, cache, state = carry
        cache, state = decode_step(model, params, cache, state, sampling)
        return steps_left - 1, cache, state

    _, cache, state = lax.while_loop(goes_on, step, (steps_left, cache, state))
    return cache, state


def _begin_state(
    progress: Progress,
    texts: jax.Array,  # i32[B, P]
    limits: jax.Array,  # i32[B]
    max_new_tokens: int,
    stop_tokens: jax.Array,  # i32[E]
    shape: tuple[int, ...],  # (B, V)
) -> GenerationState:
    """Begin the state after the prompts: nothing has been generated."""
    num_sequences, vocabulary = shape
    row = jnp.arange(num_sequences, dtype=jnp.int32)[:, None]
    token = jnp.where(texts < 0, vocabulary, texts)
    seen = jnp.zeros(shape, bool).at[row, token].set(True, mode="drop")
    result = Generation(
        tokens=jnp.full((num_sequences, max_new_tokens), -1, jnp.int32),
        lengths=jnp.zeros((num_sequences,), jnp.int32),
        reasons=progress.reasons,
        logprobs=jnp.zeros((num_sequences, max_new_tokens), jnp.float32),
        statistics=progress.statistics,
    )
    return GenerationState(
        result=result,
        seq_ids=progress.seq_ids,
        limits=limits,
        stop_tokens=stop_tokens,
        seen=seen,
    )


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(
                f"{name} must be a static int of at least 1, got {count!r}"
            )

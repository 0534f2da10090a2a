"""Whole generations inside one jit: a queue of prompts around one step.

One `lax.while_loop` runs the step of `jkv.decoding.step` until every sequence has
ended. Some sequences run, the others wait in order: the allocator is inside the jit, so
a sequence that ends makes room for the next one without a word from the host. Prompts
and single tokens share a step.

Symbols: Q prompts, N sequences, W places, P most prompt tokens, G most new tokens, V
tokens in the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jkv.decoding.beginning import StepSizes, begin_generation
from jkv.decoding.ending import Stops
from jkv.decoding.model import Model
from jkv.decoding.options import GREEDY, Sampling
from jkv.decoding.progress import GenerationState
from jkv.decoding.results import Generation
from jkv.decoding.step import run_step
from jkv.metadata.requests import Integer, Integers, Texts, as_index
from jkv.state import Cache
from jkv.state.entry import takes_cache

# Rows of a step with prompts when the caller does not say: enough to keep a processor
# busy, few enough that the step's activations stay small.
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
    stop_sequences: Texts | None = None,  # i32[F, C]
    sampling: Sampling = GREEDY,
    num_samples: int = 1,
    max_running: int | None = None,
    chunk_size: int = CHUNK_SIZE,
    row_counts: tuple[int, ...] | None = None,
    salts: Integers = 0,
) -> tuple[Cache, Generation]:
    """Continue B prompts until each has ended, and free them.

    Nothing in here depends on values: one trace serves all prompts, limits, stop tokens
    and sampling parameters of the same shapes. Jit it with the cache donated, or every
    call copies the pool::

        generate = jax.jit(
            jkv.generate,
            static_argnames=(
                "model", "max_new_tokens", "num_samples", "max_running", "chunk_size",
                "row_counts",
            ),
            donate_argnames="cache",
        )

    `max_running` sequences run at one time, the others wait in order. Sequences take
    blocks as they grow. When blocks run out the youngest gives its own back and waits,
    to be computed again: a sequence ends with OUT_OF_BLOCKS only if it would not fit
    alone. So tokens and reasons are those that each sequence has alone, whatever else
    runs: to the bit where the model's arithmetic does not depend on the number of rows.

    Args:
      model: see `Model`; hashable, as it is static under jit.
      params: the model's weights.
      cache: may hold other sequences, which stay as they are.
      prompts: i32[B, P], -1 after each prompt's end, or a list of token ids for each;
        one that is empty is not begun. Lists of other lengths compile anew.
      max_new_tokens: most new tokens of any sequence, G; static.
      limits: i32[B], most new tokens of each, at most G; None is G for all.
      stop_tokens: i32[E], tokens that end a sequence; they are kept in the result.
      stop_sequences: i32[F, C], -1 after each one's end: a sequence ends when its new
        tokens end with one of them; they are kept.
      sampling: how tokens are chosen, one number or B * num_samples; greedy by default.
      num_samples: continuations of each prompt, which is computed once (`fork`);
        static. Sample j of prompt i is sequence `i * num_samples + j` of the result.
      max_running: most sequences that run at one time, W; static. None is all of them.
        A cache with fewer rows runs fewer.
      chunk_size: rows of a step that computes prompts, unless `row_counts` says;
        static. Take few where the prefix cache leaves few.
      row_counts: rows that a step may have, ascending, the last at least W; static. A
        step takes the smallest that holds its work, each is a program to compile. None
        is W and the larger of W and `chunk_size`, which is B * P at most.
      salts: i32[B] or int, domains of the prefix cache, if the cache has one: what
        earlier prompts of a domain left behind is not computed again.

    Returns:
      The cache, all sequences of this call freed, and a `Generation`.

    Raises:
      ValueError: for arguments of a wrong shape or type, or a model whose logits are
        not [B, V], when it is traced.

    Example:
      >>> import jax, jax.numpy as jnp, jkv
      >>> def count_on(params, tokens, cache, batch, *, all_rows=False):
      ...     logits = jax.nn.one_hot(tokens + 1, 100)
      ...     return (logits if all_rows else logits[batch.last_rows]), cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16))
      >>> cache, result = jkv.generate(count_on, None, cache, [[5, 6, 7], [40], [60]],
      ...     max_new_tokens=4, stop_tokens=[9], max_running=2)
      >>> result.tokens.tolist()
      [[8, 9, -1, -1], [41, 42, 43, 44], [61, 62, 63, 64]]
      >>> [jkv.FinishReason(reason).name for reason in result.reasons.tolist()]
      ['STOP', 'LENGTH', 'LENGTH']
    """
    state = begin_generation(
        model,
        params,
        cache,
        prompts,
        max_new_tokens=max_new_tokens,
        limits=limits,
        stops=Stops.of(stop_tokens, stop_sequences),
        num_samples=num_samples,
        sizes=StepSizes(max_running, chunk_size, row_counts),
        salts=salts,
    )
    cache, state = _loop(
        model,
        params,
        cache,
        state,
        sampling,
        lambda state, _: jnp.any(state.is_running),
    )
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
    stop_sequences: Texts | None = None,  # i32[F, C]
    sampling: Sampling = GREEDY,
    num_samples: int = 1,
    max_running: int | None = None,
    chunk_size: int = CHUNK_SIZE,
    row_counts: tuple[int, ...] | None = None,
    salts: Integers = 0,
) -> tuple[Cache, GenerationState]:
    """Put the first of B prompts in the cache, and choose the first token of each.

    The first half of `generate`, for callers that look at the tokens between steps.
    Sequences stay open until `decode` ends them. To end some before, `cancel` them.
    Whoever frees the ids in `state.seq_ids` with `jkv.free` ends these, too: the next
    `decode` finds them gone and calls them CANCELLED.

    Args:
      model: as for `generate`.
      params: as for `generate`.
      cache: as for `generate`.
      prompts: as for `generate`.
      max_new_tokens: as for `generate`.
      limits: as for `generate`.
      stop_tokens: as for `generate`.
      stop_sequences: as for `generate`.
      sampling: as for `generate`.
      num_samples: as for `generate`.
      max_running: as for `generate`.
      chunk_size: as for `generate`.
      row_counts: as for `generate`.
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
    state = begin_generation(
        model,
        params,
        cache,
        prompts,
        max_new_tokens=max_new_tokens,
        limits=limits,
        stops=Stops.of(stop_tokens, stop_sequences),
        num_samples=num_samples,
        sizes=StepSizes(max_running, chunk_size, row_counts),
        salts=salts,
    )

    def lacks_token(state: GenerationState, num_steps: jax.Array) -> jax.Array:
        places, lengths = state.places, state.result.lengths
        is_new = places.is_running & (lengths[places.sequences] == 0)
        is_first = (num_steps == 0) & jnp.any(state.is_running)
        return is_first | jnp.any(is_new)

    return _loop(model, params, cache, state, sampling, lacks_token)


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
    """Do steps: a token for each running sequence, or a piece of its prompt.

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
    most = jnp.asarray(as_index(num_steps))
    return _loop(
        model,
        params,
        cache,
        state,
        sampling,
        lambda state, count: (count < most) & jnp.any(state.is_running),
    )


def _loop(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    sampling: Sampling,
    goes_on: Callable[[GenerationState, jax.Array], jax.Array],
) -> tuple[Cache, GenerationState]:
    """Do steps for as long as `goes_on(state, steps so far)` is true."""
    Carry = tuple[jax.Array, Cache, GenerationState, jax.Array]

    def step(carry: Carry) -> Carry:
        num_steps, cache, state, logits = carry
        cache, state, logits = run_step(model, params, cache, state, sampling, logits)
        return num_steps + 1, cache, state, logits

    logits = jnp.zeros(state.seen.shape, jnp.float32)
    _, cache, state, _ = lax.while_loop(
        lambda carry: goes_on(carry[2], carry[0]),
        step,
        (jnp.zeros((), jnp.int32), cache, state, logits),
    )
    return cache, state

"""Stepping: the loop of `generate` in windows, for hosts that look in between.

`begin` lets prompts wait, `prefill` goes on until those that run have a first token,
`decode` does as many steps as it is told. In between a host may add prompts
(`add_prompts`) and end sequences (`cancel`).

Symbols: Q prompts, N sequences, W places, P most prompt tokens, G most new tokens, V
tokens in the vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jkv.decoding.model.exact import Exact, ExactShape
from jkv.decoding.model.protocol import Model
from jkv.decoding.model.rows import CHUNK_SIZE
from jkv.decoding.model.runner import Runner
from jkv.decoding.sampling.choice import Choice
from jkv.decoding.sampling.options import GREEDY, Sampling
from jkv.decoding.scheduler.start import Sizes, begin_generation
from jkv.decoding.scheduler.state import GenerationState
from jkv.decoding.speculation.loop import begin_speculation, run_steps
from jkv.decoding.speculation.options import DraftModel, PromptLookup
from jkv.decoding.steering.rows import as_steering, check_steering_of, with_variants
from jkv.decoding.texts.prompts import Prompts
from jkv.decoding.texts.stops import Stops
from jkv.metadata.requests import Integer, Integers, Texts, as_index
from jkv.state import Cache
from jkv.state.entry import takes_cache
from jkv.steering import Steering


@takes_cache(argument=2)
def begin(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: Texts,  # i32[B, P]
    *,
    max_new_tokens: int,
    limits: Integers | None = None,  # i32[B]
    stop_tokens: Integers = (),  # i32[E]
    stop_sequences: Texts | None = None,  # i32[F, C]
    num_samples: int = 1,
    max_running: int | None = None,
    chunk_size: int = CHUNK_SIZE,
    row_counts: tuple[int, ...] | None = None,
    salts: Integers = 0,
    speculate: PromptLookup | DraftModel | None = None,
    steering: Steering | None = None,
    variants: Integers = 0,
    exact: ExactShape = False,
) -> GenerationState:
    """Let B prompts wait; `decode` does the rest, any number of steps at a time.

    For hosts that add prompts later (`add_prompts`) and so begin with empty ones. The
    model is traced for the shape of its logits, not run. What stops them may be of each
    prompt, with an axis more; then prompts that are added bring their own.

    Args:
      model: as for `generate`.
      params: as for `generate`.
      cache: as for `generate`.
      prompts: as for `generate`.
      max_new_tokens: as for `generate`.
      limits: as for `generate`.
      stop_tokens: as for `generate`, or i32[B, E].
      stop_sequences: as for `generate`, or i32[B, F, C].
      num_samples: as for `generate`.
      max_running: as for `generate`.
      chunk_size: as for `generate`.
      row_counts: as for `generate`.
      salts: as for `generate`.
      speculate: as for `generate`, for `decode` with the same. The cache of a draft is
        a part of the state from now on.
      steering: as for `generate`, for `decode` and `add_prompts` with the same.
      variants: as for `generate`.
      exact: as for `generate`; the state keeps it for `decode`.

    Returns:
      The state that `decode` goes on from. The cache is as it was.

    Raises:
      ValueError: for arguments of a wrong shape or type.

    Example:
      >>> import jax, jkv
      >>> from jkv.decoding import begin, decode
      >>> def count_on(params, tokens, cache, batch, *, all_rows=False):
      ...     logits = jax.nn.one_hot(tokens + 1, 100)
      ...     return (logits if all_rows else logits[batch.last_rows]), cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16))
      >>> prompts = [[5, 6, 7], [40]]
      >>> state = begin(count_on, None, cache, prompts, max_new_tokens=4)
      >>> cache, state = decode(count_on, None, cache, state)
      >>> state.result.tokens.tolist()
      [[8, 9, 10, 11], [41, 42, 43, 44]]
    """
    given = Prompts.of(
        prompts, limits=limits, max_new_tokens=max_new_tokens, salts=salts
    )
    steering = as_steering(steering)
    state = begin_generation(
        Runner(model, params),
        cache,
        with_variants(given, steering, variants),
        Stops.of(stop_tokens, stop_sequences, given.lengths.shape[0]),
        Sizes(
            max_new_tokens,
            num_samples,
            max_running,
            chunk_size,
            row_counts,
            Exact.of(exact),
        ),
        steering,
    )
    return begin_speculation(state, speculate)


@takes_cache(argument=2)
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
    speculate: PromptLookup | DraftModel | None = None,
    steering: Steering | None = None,
    variants: Integers = 0,
    exact: ExactShape = False,
) -> tuple[Cache, GenerationState]:
    """Put the first of B prompts in the cache, and choose the first token of each.

    The first half of `generate`, for callers that look at the tokens between steps.
    Sequences stay open until `decode` ends them. To end some before, `cancel` them.
    To free the ids in `state.seq_ids` with `jkv.free` ends their sequences, too: the
    next `decode` finds them gone, and their reason is CANCELLED.

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
      speculate: as for `begin`; first tokens come without guesses.
      steering: as for `begin`.
      variants: as for `begin`.
      exact: as for `begin`.

    Returns:
      The cache, and the state that `decode` goes on from.

    Raises:
      ValueError: for arguments of a wrong shape or type.

    Example:
      >>> import jax, jkv
      >>> from jkv.decoding import prefill
      >>> def count_on(params, tokens, cache, batch, *, all_rows=False):
      ...     logits = jax.nn.one_hot(tokens + 1, 100)
      ...     return (logits if all_rows else logits[batch.last_rows]), cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16))
      >>> cache, state = prefill(
      ...     count_on, None, cache, [[5, 6, 7], [40]], max_new_tokens=4)
      >>> state.result.tokens.tolist(), state.is_running.tolist()
      ([[8, -1, -1, -1], [41, -1, -1, -1]], [True, True])
    """
    state = begin(
        model,
        params,
        cache,
        prompts,
        max_new_tokens=max_new_tokens,
        limits=limits,
        stop_tokens=stop_tokens,
        stop_sequences=stop_sequences,
        num_samples=num_samples,
        max_running=max_running,
        chunk_size=chunk_size,
        row_counts=row_counts,
        salts=salts,
        speculate=speculate,
        steering=steering,
        variants=variants,
        exact=exact,
    )

    def lacks_token(state: GenerationState, num_steps: jax.Array) -> jax.Array:
        places, lengths = state.places, state.result.lengths
        is_new = places.is_running & (lengths[places.sequences] == 0)
        is_first = (num_steps == 0) & jnp.any(state.is_running)
        return is_first | jnp.any(is_new)

    choice = Choice(sampling, steering)
    return run_steps(Runner(model, params), cache, state, choice, lacks_token)


@takes_cache(argument=2)
def decode(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    *,
    sampling: Sampling = GREEDY,
    num_steps: Integer | None = None,
    speculate: PromptLookup | DraftModel | None = None,
    steering: Steering | None = None,
) -> tuple[Cache, GenerationState]:
    """Do steps: a token for each running sequence, or a piece of its prompt.

    Args:
      model: as for `prefill`.
      params: as for `prefill`.
      cache: from `prefill`, or from an earlier `decode`; jit may donate it.
      state: what came with the cache; jit may donate it, too.
      sampling: as for `prefill`.
      num_steps: steps to do at most, may be traced; None goes on until all have ended.
      speculate: how to guess tokens, as `begin` or `prefill` was told, so that a step
        may bring several; None does plain steps. The draft's cache is that of the
        state: the one in a `DraftModel` is not looked at.
      steering: as `begin` or `prefill` was told.

    Returns:
      The cache and the state. `state.is_running` says which sequences go on; those that
      have ended are freed, and `state.result` has their tokens.

    Raises:
      ValueError: for `Sampling` fields of a wrong shape.

    Example:
      A host that shows tokens as they come, two steps at a time. `jkv.jitted.decode` is
      jitted, and takes over `cache` and `state`:

      >>> import jax, jkv
      >>> from jkv.decoding import decode, prefill
      >>> def count_on(params, tokens, cache, batch, *, all_rows=False):
      ...     logits = jax.nn.one_hot(tokens + 1, 100)
      ...     return (logits if all_rows else logits[batch.last_rows]), cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16))
      >>> cache, state = prefill(
      ...     count_on, None, cache, [[5, 6, 7], [40]], max_new_tokens=4)
      >>> while state.is_running.any():
      ...     cache, state = decode(count_on, None, cache, state, num_steps=2)
      ...     print(state.result.tokens.tolist())
      [[8, 9, 10, -1], [41, 42, 43, -1]]
      [[8, 9, 10, 11], [41, 42, 43, 44]]
    """
    if num_steps is None:
        num_steps = jnp.iinfo(jnp.int32).max
    most = jnp.asarray(as_index(num_steps))
    steering = as_steering(steering)
    check_steering_of(state.result.steering_state, steering)
    return run_steps(
        Runner(model, params),
        cache,
        state,
        Choice(sampling, steering),
        lambda state, count: (count < most) & jnp.any(state.is_running),
        speculate,
    )

"""Whole generations inside one jit: a queue of prompts around one step.

One loop does steps (`jkv.decoding.scheduler.step`) until every sequence has ended. Some
sequences run, the others wait in order: the allocator is inside the jit, so a sequence
that ends makes room for the next one without the host. Prompts and single tokens share
a step.

Hosts that look in between take the loop in windows: `begin` lets prompts wait,
`prefill` goes on until those that run have a first token, `decode` does as many steps
as it is told. In between a host may add prompts (`add_prompts`) and end sequences
(`cancel`).
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jkv.decoding.arguments.asked import Asked, Fields, How, OfHow, check_names, take
from jkv.decoding.model.protocol import Model
from jkv.decoding.model.runner import Runner
from jkv.decoding.model.steps import Steps
from jkv.decoding.sampling.next_token import Bounds, judge_prompts
from jkv.decoding.scheduler.data_parallel import generate_on_pools
from jkv.decoding.scheduler.queue import make_queue
from jkv.decoding.scheduler.state import GenerationState, Holder, Places
from jkv.decoding.speculation.loop import begin_speculation, run_steps
from jkv.decoding.steering.rows import begin_rows, check_steering_of
from jkv.decoding.texts.blocks import count_free_blocks, find_block_size
from jkv.decoding.texts.prompts import Prompts
from jkv.decoding.texts.results import FinishReason, Generation
from jkv.indexing import gather
from jkv.metadata.requests import Integer, Texts, as_index
from jkv.state import Cache
from jkv.state.entry import takes_cache


@takes_cache(argument=2, any_pools=True)
def generate(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: Texts | Prompts,  # i32[B, P]
    *,
    steps: Steps | None = None,
    how: How | None = None,
    **fields: Unpack[Fields],
) -> tuple[Cache, Generation]:
    """Continue B prompts until each has ended, and free them.

    Nothing in here depends on values: one trace serves all prompts, limits, stop tokens
    and sampling parameters of the same shapes. `jkv.jitted.generate` is this function
    jitted with the cache donated; without donation every call copies the pool.

    `max_running` sequences run at one time, the others wait in order. Sequences take
    blocks as they grow. When blocks run out the youngest gives its own back and waits,
    to be computed again: a sequence ends with OUT_OF_BLOCKS only if it would not fit
    alone. So tokens and reasons are those that each sequence has alone, whatever else
    runs: to the bit where the model's arithmetic does not depend on the number of rows.
    (With a `DraftModel` and a temperature it is their distribution that does not.)

    A cache with several pools (`init(..., pools=)`) has the prompts dealt to them, each
    to the pool with most blocks left; results are in the order of the prompts, and
    counts in the statistics are sums over the pools.

    Args:
      model: see `Model`; hashable, as it is static under jit.
      params: the model's weights. A cache with `prefix_caching` finds what earlier
        weights computed: after new ones give it to `clear_prefixes`, or other `salts`.
      cache: may hold other sequences, which stay as they are.
      prompts: i32[B, P], -1 after each prompt's end, or a list of token ids for each;
        or `Prompts`, which say more of each.
      steps: how much is done, and in which sizes; static.
      how: how tokens are chosen.
      fields: those of `Steps`, `How` and `Prompts.of` instead, each by its name, as in
        `max_new_tokens=9`.

    Returns:
      The cache, all sequences of this call freed, and a `Generation`.

    Raises:
      ValueError: for arguments of a wrong shape or type, or a model whose logits are
        not [B, V], when it is traced.

    Example:
      >>> import jax, jax.numpy as jnp, jkv
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16))
      >>> cache, result = jkv.generate(count_on, None, cache, [[5, 6, 7], [40], [60]],
      ...     max_new_tokens=4, stop_tokens=[9], max_running=2)
      >>> result.tokens.tolist()
      [[8, 9, -1, -1], [41, 42, 43, 44], [61, 62, 63, 64]]
      >>> [jkv.FinishReason(reason).name for reason in result.reasons.tolist()]
      ['STOP', 'LENGTH', 'LENGTH']
    """
    asked = Asked.of("generate", prompts, steps, how, fields)

    def run(
        params: Any, cache: Cache, prompts: Prompts, how: How
    ) -> tuple[Cache, Generation]:
        """Do steps on one pool until nothing runs."""
        runner = Runner(model, params)
        mine = asked._replace(prompts=prompts, how=how)
        cache, state = run_steps(
            runner,
            cache,
            begin_generation(runner, cache, mine),
            how.choice(),
            lambda state, _: jnp.any(state.is_running),
            how.speculate,
        )
        return cache, state.result

    if cache.pools is not None:
        num_samples = asked.steps.num_samples
        return generate_on_pools(
            run, params, cache, asked.prompts, asked.how, num_samples
        )
    return run(params, cache, asked.prompts, asked.how)


@takes_cache(argument=2)
def begin(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: Texts | Prompts,  # i32[B, P]
    *,
    steps: Steps | None = None,
    how: How | None = None,
    **fields: Unpack[Fields],
) -> GenerationState:
    """Let B prompts wait; `decode` does the rest, any number of steps at a time.

    For hosts that add prompts later and so begin with empty ones, as the example of
    `add_prompts` does. The model is traced for the shape of its logits, not run. If
    each of the prompts has stop tokens and sequences of its own, prompts that are added
    bring theirs.

    Args:
      model: as for `generate`.
      params: as for `generate`.
      cache: as for `generate`.
      prompts: as for `generate`.
      steps: as for `generate`; the state keeps them for `decode`.
      how: as for `generate`, for `decode` with the same. The cache of a draft is a part
        of the state from now on.
      fields: as for `generate`.

    Returns:
      The state that `decode` goes on from. The cache is as it was.

    Raises:
      ValueError: for arguments of a wrong shape or type.
    """
    asked = Asked.of("begin", prompts, steps, how, fields)
    return begin_generation(Runner(model, params), cache, asked)


@takes_cache(argument=2)
def prefill(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: Texts | Prompts,  # i32[B, P]
    *,
    steps: Steps | None = None,
    how: How | None = None,
    **fields: Unpack[Fields],
) -> tuple[Cache, GenerationState]:
    """Put the first of B prompts in the cache, and choose the first token of each.

    The first half of `generate`, for callers that look at the tokens between steps, as
    in the example of `decode`.
    Sequences stay open until `decode` ends them. To end some before, `cancel` them.
    To free the ids in `state.seq_ids` with `jkv.free` ends their sequences, too: the
    next `decode` finds them gone, and their reason is CANCELLED.

    Args:
      model: as for `generate`.
      params: as for `generate`.
      cache: as for `generate`.
      prompts: as for `generate`.
      steps: as for `begin`.
      how: as for `begin`; first tokens come without guesses.
      fields: as for `generate`.

    Returns:
      The cache, and the state that `decode` goes on from.

    Raises:
      ValueError: for arguments of a wrong shape or type.
    """
    runner = Runner(model, params)
    asked = Asked.of("prefill", prompts, steps, how, fields)
    state = begin_generation(runner, cache, asked)

    def lacks_token(state: GenerationState, num_steps: jax.Array) -> jax.Array:
        places, lengths = state.places, state.result.lengths
        is_new = places.is_running & (gather(lengths, places.sequences) == 0)
        is_first = (num_steps == 0) & jnp.any(state.is_running)
        return is_first | jnp.any(is_new)

    return run_steps(runner, cache, state, asked.how.choice(), lacks_token)


@takes_cache(argument=2)
def decode(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    *,
    num_steps: Integer | None = None,
    how: How | None = None,
    **fields: Unpack[OfHow],
) -> tuple[Cache, GenerationState]:
    """Do steps: a token for each running sequence, or a piece of its prompt.

    Args:
      model: as for `prefill`.
      params: as for `prefill`.
      cache: from `prefill`, or from an earlier `decode`; jit may donate it.
      state: what came with the cache; jit may donate it, too.
      num_steps: steps to do at most, may be traced; None goes on until all have ended.
      how: how tokens are chosen, as `begin` or `prefill` was told. Without `speculate`
        it does plain steps; with it the draft's cache is that of the state: the one in
        a `DraftModel` is not looked at.
      fields: those of `How` instead, each by its name, as in `sampling=sampling`.

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
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
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
    check_names("decode", fields, OfHow)
    how = take(how, How, OfHow, fields).check()
    check_steering_of(state.result.steering_state, how.steering)
    return run_steps(
        Runner(model, params),
        cache,
        state,
        how.choice(),
        lambda state, count: (count < most) & jnp.any(state.is_running),
        how.speculate,
    )


def begin_generation(runner: Runner, cache: Cache, asked: Asked) -> GenerationState:
    """Begin with everything in the queue, after sizes were checked."""
    prompts, stops, steps, how = asked
    num_samples, exact = steps.num_samples, steps.exact_shape
    num_sequences = prompts.lengths.shape[0] * num_samples
    num_places, row_counts = steps.resolve(num_sequences, prompts.tokens.size)
    if exact is not None:
        exact.check_cache(cache)
    num_blocks = count_free_blocks(cache)
    size = find_block_size(cache, row_counts)
    bounds = Bounds(cache.max_context_length, size, num_blocks)
    vocabulary = runner.count_vocabulary(cache, num_places)
    reasons = judge_prompts(prompts, bounds, vocabulary, how.steering)
    num_rows = cache.metadata.sequences.free_rows.count
    has_no_row = (reasons == FinishReason.RUNNING) & (num_rows == 0)
    reasons = jnp.where(has_no_row, jnp.int32(FinishReason.OUT_OF_SEQUENCES), reasons)
    reasons = jnp.repeat(reasons, num_samples)
    has_snapshots = cache.metadata.index.snapshot_every is not None
    steered = begin_rows(how.steering, prompts, num_samples)
    state = GenerationState(
        result=Generation.empty(reasons, steps.max_new_tokens, steered),
        prompts=prompts,
        stops=stops,
        places=Places.empty(num_places),
        queue=make_queue(
            jnp.arange(num_sequences, dtype=jnp.int32), reasons == FinishReason.RUNNING
        ),
        holder=Holder.none(),
        seen=jnp.zeros((num_places, vocabulary), bool),
        num_blocks=num_blocks,
        most_running=jnp.minimum(
            num_rows, min(num_places, steps.max_running or num_places)
        ),
        seating_needs=tuple(jnp.zeros((), jnp.int32) for _ in num_blocks),
        speculation=None,
        partings=jnp.zeros((num_places,), jnp.int32) if has_snapshots else None,
        row_counts=row_counts,
        exact=exact,
    )
    return begin_speculation(state, how.speculate)

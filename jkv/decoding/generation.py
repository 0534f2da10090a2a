"""Generation by continuous batching inside one jit.

One loop runs steps (`jkv.decoding.scheduler.step`) until every sequence has finished.
Some sequences run, the others wait in order. The allocator is inside the jit, so a
finished sequence makes room for the next one without the host. Prompts and single
tokens share a step.

Hosts that need control between steps run the loop in windows: `begin` enqueues prompts,
`prefill` runs until each running sequence has a first token, `decode` runs a number of
steps. In between a host may add prompts (`add_prompts`) and cancel sequences
(`cancel`).
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jkv.arguments import as_index
from jkv.decoding.arguments.loop_arguments import (
    Arguments,
    DecodingFields,
    DecodingOptions,
    LoopFields,
    check_names,
    take,
)
from jkv.decoding.model.runner import Runner
from jkv.decoding.model.steps import GenerationConfig, Model
from jkv.decoding.sampling.next_token import (
    Bounds,
    begin_rows,
    check_processor_presence,
    judge_prompts,
)
from jkv.decoding.scheduler.data_parallel import generate_on_pools
from jkv.decoding.scheduler.queue import make_queue
from jkv.decoding.scheduler.state import GenerationState, Places, RetainedPrompt
from jkv.decoding.sequences.blocks import count_free_blocks, find_block_size
from jkv.decoding.sequences.prompts import Prompts
from jkv.decoding.sequences.results import FinishReason, Generation
from jkv.decoding.speculation.loop import begin_speculation, run_steps
from jkv.metadata.requests import Integer, IntegerRows
from jkv.operations import gather
from jkv.state import Cache
from jkv.state.entry import takes_cache


@takes_cache(argument=2, any_pools=True)
def generate(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: IntegerRows | Prompts,  # i32[B, P]
    *,
    generation_config: GenerationConfig | None = None,
    options: DecodingOptions | None = None,
    **fields: Unpack[LoopFields],
) -> tuple[Cache, Generation]:
    """Generate completions of B prompts and free their sequences.

    One trace serves all prompts, limits, stop tokens and sampling parameters of the
    same shapes. `jkv.jitted.generate` is this function jitted with the cache donated;
    without donation every call copies the pool.

    `max_running` sequences run at one time, the others wait in order. Blocks are
    allocated as sequences grow. If blocks run out, the youngest sequence is preempted
    and recomputed later; OUT_OF_BLOCKS ends only a sequence that would not fit alone.
    Tokens and reasons of a sequence are therefore independent of the rest of the batch,
    bit-identical if the model's arithmetic does not depend on the number of rows. (With
    a `DraftModel` and a temperature only their distribution is.)

    With several pools (`init(..., pools=)`) each prompt goes to the pool with most
    blocks left; results are in the order of the prompts, and statistics are sums over
    the pools.

    Args:
      model: see `Model`; hashable, as it is static under jit.
      params: the model's weights. After a weight update, clear a cache with
        `prefix_caching` (`clear_prefixes`) or use other `salts`.
      cache: may hold other sequences, which are unchanged.
      prompts: i32[B, P], -1 past the end of each, or a list of token ids for each, or
        `Prompts`.
      generation_config: lengths and step sizes; static.
      options: sampling, processors and speculation.
      fields: the fields of `GenerationConfig`, `DecodingOptions` and `Prompts.of` as
        keyword arguments, such as `max_new_tokens=9`.

    Returns:
      The cache, with all sequences of this call freed, and a `Generation`.

    Raises:
      ValueError: at trace time, for arguments of a wrong shape or type, or a model with
        logits other than [B, V].

    Example:
      >>> import jax, jax.numpy as jnp, jkv
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> cache, result = jkv.generate(count_on, None, cache, [[5, 6, 7], [40], [60]],
      ...     max_new_tokens=4, stop_tokens=[9], max_running=2)
      >>> result.tokens.tolist()
      [[8, 9, -1, -1], [41, 42, 43, 44], [61, 62, 63, 64]]
      >>> [jkv.FinishReason(reason).name for reason in result.reasons.tolist()]
      ['STOP', 'LENGTH', 'LENGTH']
    """
    args = Arguments.of("generate", prompts, generation_config, options, fields)

    def run(
        params: Any, cache: Cache, prompts: Prompts, options: DecodingOptions
    ) -> tuple[Cache, Generation]:
        """Run steps on one pool until all sequences have finished."""
        runner = Runner(model, params)
        mine = args._replace(prompts=prompts, options=options)
        cache, state = run_steps(
            runner,
            cache,
            begin_generation(runner, cache, mine),
            options.choice(),
            lambda state, _: jnp.any(state.is_running),
            options.speculate,
        )
        return cache, state.result

    if cache.pools is not None:
        num_samples = args.config.num_samples
        return generate_on_pools(
            run, params, cache, args.prompts, args.options, num_samples
        )
    return run(params, cache, args.prompts, args.options)


@takes_cache(argument=2)
def begin(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: IntegerRows | Prompts,  # i32[B, P]
    *,
    generation_config: GenerationConfig | None = None,
    options: DecodingOptions | None = None,
    **fields: Unpack[LoopFields],
) -> GenerationState:
    """Enqueue B prompts for `decode`, without running the model.

    For hosts that add prompts later and start with empty ones, as in the example of
    `add_prompts`. The model is only traced, for the shape of its logits. If the first
    prompts have stop conditions for each prompt, added prompts need theirs.

    Args:
      model: as for `generate`.
      params: as for `generate`.
      cache: as for `generate`.
      prompts: as for `generate`.
      generation_config: as for `generate`; stored in the state for `decode`.
      options: as for `generate`; pass the same to `decode`.
      fields: as for `generate`.

    Returns:
      The state for `decode`. The cache is unchanged.

    Raises:
      ValueError: for arguments of a wrong shape or type.
    """
    args = Arguments.of("begin", prompts, generation_config, options, fields)
    return begin_generation(Runner(model, params), cache, args)


@takes_cache(argument=2)
def prefill(
    model: Model,
    params: Any,
    cache: Cache,
    prompts: IntegerRows | Prompts,  # i32[B, P]
    *,
    generation_config: GenerationConfig | None = None,
    options: DecodingOptions | None = None,
    **fields: Unpack[LoopFields],
) -> tuple[Cache, GenerationState]:
    """Prefill the first of B prompts and choose the first token of each.

    The first half of `generate`, for callers that read tokens between steps, as in the
    example of `decode`.
    Sequences stay open until `decode` finishes them; `cancel` finishes them earlier.
    Freeing the ids in `state.seq_ids` with `jkv.free` cancels them as well: the next
    `decode` sets their reason to CANCELLED.

    Args:
      model: as for `generate`.
      params: as for `generate`.
      cache: as for `generate`.
      prompts: as for `generate`.
      generation_config: as for `begin`.
      options: as for `begin`; first tokens are chosen without draft tokens.
      fields: as for `generate`.

    Returns:
      The cache and the state for `decode`.

    Raises:
      ValueError: for arguments of a wrong shape or type.
    """
    runner = Runner(model, params)
    args = Arguments.of("prefill", prompts, generation_config, options, fields)
    state = begin_generation(runner, cache, args)

    def lacks_token(state: GenerationState, num_steps: jax.Array) -> jax.Array:
        places, lengths = state.places, state.result.lengths
        is_new = places.is_running & (gather(lengths, places.sequences) == 0)
        is_first = (num_steps == 0) & jnp.any(state.is_running)
        return is_first | jnp.any(is_new)

    given = runner, cache, state, args.options.choice(), lacks_token
    return run_steps(*given, args.options.speculate, drafts=False)


@takes_cache(argument=2)
def decode(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    *,
    num_steps: Integer | None = None,
    options: DecodingOptions | None = None,
    **fields: Unpack[DecodingFields],
) -> tuple[Cache, GenerationState]:
    """Run steps: each running sequence gets a token, or computes a piece of its prompt.

    Args:
      model: as for `prefill`.
      params: as for `prefill`.
      cache: from `prefill`, or from an earlier `decode`; jit may donate it.
      state: returned with the cache; jit may donate it, too.
      num_steps: most steps to run, may be traced; None runs until all have finished.
      options: as passed to `begin` or `prefill`. Without `speculate` steps are plain,
        and the layers of a drafter are not written: later drafts may be worse.
      fields: the fields of `DecodingOptions` as keyword arguments, such as
        `sampling=sampling`.

    Returns:
      The cache and the state. `state.is_running` marks unfinished sequences; finished
      ones are freed, and `state.result` has their tokens.

    Raises:
      ValueError: for `Sampling` fields of a wrong shape.

    Example:
      A host that prints tokens every two steps. `jkv.jitted.decode` is jitted and takes
      over `cache` and `state`:

      >>> import jax, jkv
      >>> from jkv.decoding import decode, prefill
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig.toy())
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
    check_names("decode", fields, DecodingFields)
    options = take(options, DecodingOptions, DecodingFields, fields).check()
    check_processor_presence(state.result.processor_state, options.logits_processor)
    return run_steps(
        Runner(model, params),
        cache,
        state,
        options.choice(),
        lambda state, count: (count < most) & jnp.any(state.is_running),
        options.speculate,
    )


def begin_generation(runner: Runner, cache: Cache, args: Arguments) -> GenerationState:
    """Return a state with all prompts in the queue."""
    prompts, stops, config, options = args
    runner = runner._replace(drafter=options.speculate)
    num_samples, exact = config.num_samples, config.exact_shape
    num_sequences = prompts.lengths.shape[0] * num_samples
    num_places, row_counts = config.resolve(num_sequences, prompts.tokens.size)
    if exact is not None:
        exact.check_cache(cache)
    num_blocks = count_free_blocks(cache)
    size = find_block_size(cache, row_counts)
    shortening = args.find_shortening(cache) if config.shortens else None
    bounds = Bounds(cache.max_context_length, size, num_blocks, shortening)
    vocabulary = runner.count_vocabulary(cache, num_places)
    checks = vocabulary, options.logits_processor, row_counts[-1]
    reasons = judge_prompts(prompts, bounds, *checks)
    num_rows = cache.metadata.sequences.free_rows.count
    has_no_row = (reasons == FinishReason.RUNNING) & (num_rows == 0)
    reasons = jnp.where(has_no_row, jnp.int32(FinishReason.OUT_OF_SEQUENCES), reasons)
    reasons = jnp.repeat(reasons, num_samples)
    has_snapshots = cache.metadata.index.snapshot_every is not None
    processor_state = begin_rows(options.logits_processor, prompts, num_samples)
    state = GenerationState(
        result=Generation.empty(reasons, config.max_new_tokens, processor_state),
        prompts=prompts,
        stops=stops,
        places=Places.empty(num_places),
        queue=make_queue(
            jnp.arange(num_sequences, dtype=jnp.int32), reasons == FinishReason.RUNNING
        ),
        retained=RetainedPrompt.none(),
        seen=jnp.zeros((num_places, vocabulary), bool),
        num_blocks=num_blocks,
        most_running=jnp.minimum(
            num_rows, min(num_places, config.max_running or num_places)
        ),
        seating_needs=tuple(jnp.zeros((), jnp.int32) for _ in num_blocks),
        speculation=None,
        divergence=jnp.zeros((num_places,), jnp.int32) if has_snapshots else None,
        row_counts=row_counts,
        exact=exact,
        shortening=shortening,
    )
    return begin_speculation(runner, cache, state)

"""Whole generations inside one jit: a queue of prompts around one step.

One loop does steps (`jkv.decoding.scheduler.step`) until every sequence has ended. Some
sequences run, the others wait in order: the allocator is inside the jit, so a sequence
that ends makes room for the next one without the host. Prompts and single tokens share
a step.

Symbols: Q prompts, N sequences, W places, P most prompt tokens, G most new tokens, V
tokens in the vocabulary.
"""

from typing import Any

import jax.numpy as jnp

from jkv.decoding.model.exact import Exact, ExactShape
from jkv.decoding.model.protocol import Model
from jkv.decoding.model.rows import CHUNK_SIZE
from jkv.decoding.model.runner import Runner
from jkv.decoding.sampling.choice import Choice
from jkv.decoding.sampling.options import GREEDY, Sampling
from jkv.decoding.scheduler.data_parallel import generate_on_pools
from jkv.decoding.scheduler.start import Sizes, begin_generation
from jkv.decoding.speculation.loop import Speculation, begin_speculation, run_steps
from jkv.decoding.speculation.options import DraftModel, PromptLookup
from jkv.decoding.steering.rows import as_steering, with_variants
from jkv.decoding.texts.prompts import Prompts
from jkv.decoding.texts.results import Generation
from jkv.decoding.texts.stops import Stops
from jkv.metadata.requests import Integers, Texts
from jkv.state import Cache
from jkv.state.entry import takes_cache
from jkv.steering import Steering

# What a generation does beside its model: how it guesses, and what steers it.
Options = tuple[Speculation | None, Steering | None]


@takes_cache(argument=2, any_pools=True)
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
    speculate: PromptLookup | DraftModel | None = None,
    steering: Steering | None = None,
    variants: Integers = 0,
    exact: ExactShape = False,
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
        one that is empty is not begun. Lists of other lengths compile anew.
      max_new_tokens: most new tokens of any sequence, G; static.
      limits: i32[B], most new tokens of each, at most G; None is G for all.
      stop_tokens: i32[E], tokens that end a sequence; they are kept in the result. Each
        prompt can have its own, i32[B, E] with -1 for none.
      stop_sequences: i32[F, C], -1 after each one's end, or a list of token ids for
        each: a sequence ends when its new tokens end with one of them; they are kept.
        Of each prompt: i32[B, F, C], or a list of such lists.
      sampling: how tokens are chosen, one number or B * num_samples; greedy by default.
      num_samples: continuations of each prompt, which is computed once (`fork`);
        static. Sample j of prompt i is sequence `i * num_samples + j` of the result.
      max_running: most sequences that run at one time, W; static. None is all of them.
        A cache with fewer rows runs fewer. With several pools it holds for each.
      chunk_size: rows of a step that computes prompts, unless `row_counts` says;
        static. Take few where the prefix cache leaves few.
      row_counts: rows that a step may have, ascending, the last at least W; static. A
        step takes the smallest that holds its work, each is a program to compile. None
        is W and the larger of W and `chunk_size`, which is B * P at most.
      salts: i32[B] or int, domains of the prefix cache, if the cache has one: what
        earlier prompts of a domain left behind is not computed again. The number of the
        weights keeps versions apart.
      speculate: how to guess tokens, of which a step checks several: a `PromptLookup`
        or a `DraftModel`; None does not. The model must take `all_rows`. With several
        pools each guesses for its own; the cache of a draft lies on the whole mesh.
      steering: which tokens texts may have, see `Steering`; None leaves them all. A
        token that steering says is the only one is guessed without fail, if `speculate`
        is given.
      variants: i32[B] or int, how each prompt is steered, of `steering.num_variants`
        ways; -1 is not at all.
      exact: static; True or (W, R): tokens and log-probabilities are the same bits
        whatever else is in the call or came before, as `jkv.check_exact` shows for a
        model of your own. Every call of the model has W requests and R rows, 64 and 64
        for True, and costs that much.

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
    given = Prompts.of(
        prompts, limits=limits, max_new_tokens=max_new_tokens, salts=salts
    )
    steering = as_steering(steering)
    given = with_variants(given, steering, variants)
    stops = Stops.of(stop_tokens, stop_sequences, given.lengths.shape[0])
    options = speculate, steering
    sizes = Sizes(
        max_new_tokens,
        num_samples,
        max_running,
        chunk_size,
        row_counts,
        Exact.of(exact),
    )

    def run(
        params: Any, cache: Cache, prompts: Prompts, options: Options
    ) -> tuple[Cache, Generation]:
        """Do steps on one pool until nothing runs."""
        runner, (speculate, steering) = Runner(model, params), options
        state = begin_generation(runner, cache, prompts, stops, sizes, steering)
        cache, state = run_steps(
            runner,
            cache,
            begin_speculation(state, speculate),
            Choice(sampling, steering),
            lambda state, _: jnp.any(state.is_running),
            speculate,
        )
        return cache, state.result

    if cache.pools is not None:
        return generate_on_pools(run, params, cache, given, options, num_samples)
    return run(params, cache, given, options)

"""Whole generations inside one jit: a queue of prompts around one step.

One loop does steps (`jkv.decoding.scheduler.step`) until every sequence has ended. Some
sequences run, the others wait in order: the allocator is inside the jit, so a sequence
that ends makes room for the next one without the host. Prompts and single tokens share
a step.
"""

from typing import Any, Unpack

import jax.numpy as jnp

from jkv.decoding.arguments.asked import Asked, Fields, How
from jkv.decoding.model.protocol import Model
from jkv.decoding.model.runner import Runner
from jkv.decoding.model.steps import Steps
from jkv.decoding.scheduler.data_parallel import generate_on_pools
from jkv.decoding.speculation.loop import run_steps
from jkv.decoding.stepping import begin_generation
from jkv.decoding.texts.prompts import Prompts
from jkv.decoding.texts.results import Generation
from jkv.metadata.requests import Texts
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

"""Scores, bit-identical to `generate(exact=)`.

`score` computes everything in one step with a row for each token, which sums in another
order than decoding. Here prompts and completions pass through a cache in calls of one
shape, as in `generate(exact=)`: prompts in chunks, then completions, W rows at a time.

Symbols: Q prompts of at most P tokens, N continuations of at most C tokens, W requests
of a call, R rows, V vocabulary size.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jkv.config.grouped_config import GroupedConfig
from jkv.decoding.model.runner import Chunk, ChunkSizes, Runner, Unread, run_chunks
from jkv.decoding.model.steps import Exact
from jkv.decoding.sampling.draws import pick_logprobs
from jkv.decoding.scoring.scored import WITHOUT_COPIES, Scored, resize
from jkv.decoding.sequences.prompts import count_tokens
from jkv.operations import fori_loop, gather, running_sum, scatter, scatter_add, when
from jkv.state import NO_SEQUENCE, Cache
from jkv.verbs.allocation import allocate
from jkv.verbs.branching import fork


def score_exactly(
    scored: Scored,  # its windows and dtypes are used, its counts are not
    exact: Exact,  # the shape of calls
    prompts: jax.Array,  # i32[Q, P], -1 past the end of each
    continuations: jax.Array,  # i32[N, C], likewise, N a multiple of Q
) -> jax.Array:
    """Return the log-probabilities of `score`, f32[N, C]."""
    runner = Runner(scored.model, scored.params, exact)
    lengths, num_samples = count_tokens(prompts), len(continuations) // len(prompts)
    config = _resize(scored.config, prompts, continuations)
    cache = scored.init(config, (prompts, continuations))
    cache, opened = allocate(cache, jnp.zeros_like(lengths))
    cache, found = _score_first(
        runner, exact, cache, opened.seq_ids, prompts, continuations
    )
    if continuations.shape[1] > 1:
        cache, forked = fork(cache, jnp.repeat(opened.seq_ids, num_samples))
        width = exact.num_requests
        found = _score_later(runner, width, cache, forked.seq_ids, continuations, found)
    return found


def _resize(
    config: GroupedConfig, prompts: jax.Array, continuations: jax.Array
) -> GroupedConfig:
    """Return a configuration for prompts and their forks."""
    (num_prompts, width), (count, most) = prompts.shape, continuations.shape
    # A fork owns its partly filled block and later ones.
    own_blocks = -(-(config.block_size - 1 + most - 1) // config.block_size)
    prompt_blocks = -(-width // config.block_size)
    both: dict[str, Any] = dict(
        max_sequences=num_prompts + count,
        # Models with length-dependent rotations read it, so never reduce it.
        max_context_length=max(config.max_context_length, width + most - 1),
    )
    of_blocks = both | dict(
        num_blocks=num_prompts * prompt_blocks + count * own_blocks, record_tokens=False
    )
    return resize(config, lambda _: of_blocks, both | WITHOUT_COPIES)


def _score_first(
    runner: Runner,
    exact: Exact,
    cache: Cache,
    seq_ids: jax.Array,
    prompts: jax.Array,
    continuations: jax.Array,
) -> tuple[Cache, jax.Array]:
    """Compute prompts, W at a time, and score the tokens after them, f32[N, C]."""
    num_prompts, lengths = prompts.shape[0], count_tokens(prompts)
    chosen = continuations[:, 0].reshape(num_prompts, -1)
    width = exact.num_requests
    lane = jnp.arange(width, dtype=jnp.int32)

    def take(
        group: jax.Array, carry: tuple[Cache, jax.Array]
    ) -> tuple[Cache, jax.Array]:
        cache, found = carry
        index = group * width + lane
        is_prompt = index < num_prompts
        known = jnp.minimum(index, num_prompts - 1)

        def find_tokens(sequence: jax.Array, position: jax.Array) -> jax.Array:
            return jnp.maximum(gather(prompts, (known[sequence], position)), 0)

        def note(_: Cache, found: jax.Array, chunk: Chunk) -> jax.Array:
            at = jnp.where(chunk.is_whole, known, num_prompts)

            def put(found: jax.Array, logits: jax.Array) -> jax.Array:
                tokens = chosen[known].T
                scores = lax.map(lambda token: pick_logprobs(logits, token), tokens)
                return scatter(found, at, scores.T)

            return when(jnp.any(chunk.is_whole), put, found, chunk.logits)

        return run_chunks(
            runner,
            cache,
            Unread(jnp.where(is_prompt, seq_ids[known], NO_SEQUENCE), find_tokens),
            found,
            ChunkSizes(exact.num_rows),
            count_left=lambda _, done: lengths[known] - done,
            note=note,
        )

    found = jnp.zeros(chosen.shape, jnp.float32)
    num_groups = jnp.int32(-(-num_prompts // width))
    cache, found = fori_loop(jnp.int32(0), num_groups, take, (cache, found))
    is_given = continuations >= 0
    scores = jnp.zeros(continuations.shape, jnp.float32)
    scores = scores.at[:, 0].set(found.reshape(-1))
    return cache, jnp.where(is_given, scores, 0.0)


def _score_later(
    runner: Runner,
    width: int,  # W
    cache: Cache,
    seq_ids: jax.Array,
    continuations: jax.Array,
    first: jax.Array,
) -> jax.Array:
    """Feed continuations, W rows per call, and score the token after each row."""
    count, most = continuations.shape
    fed = jnp.minimum(jnp.maximum(count_tokens(continuations) - 1, 0), most - 1)
    ends = running_sum(fed)
    starts, total = ends - fed, ends[-1]
    # Continuations without fed tokens own no row.
    row = jnp.arange(width, dtype=jnp.int32)

    def take(
        call: jax.Array, carry: tuple[Cache, jax.Array]
    ) -> tuple[Cache, jax.Array]:
        cache, found = carry
        index = call * width + row
        is_row = index < total
        owner = jnp.sum(ends[None] <= index[:, None], axis=1, dtype=jnp.int32)
        owner = jnp.minimum(owner, count - 1)
        column = index - starts[owner]
        is_new = jnp.concatenate([jnp.ones((1,), bool), owner[1:] != owner[:-1]])
        rank = running_sum((is_new & is_row).astype(jnp.int32)) - 1
        request = jnp.where(is_row, rank, width)
        nowhere = jnp.full((width,), NO_SEQUENCE, jnp.int32)
        ids = scatter(nowhere, request, seq_ids[owner])
        counts = scatter_add(jnp.zeros((width,), jnp.int32), request, 1)
        tokens = gather(continuations, (owner, column))
        tokens = jnp.where(is_row, tokens, 0)
        cache, _, logits = runner.run(
            cache, ids, tokens, counts, commits=False, logit_rows=row
        )
        following = gather(continuations, (owner, column + 1))
        scores = pick_logprobs(logits, jnp.maximum(following, 0))
        at = jnp.where(is_row, owner, count)
        return cache, scatter(found, (at, column + 1), scores)

    num_calls = lax.div(total + (width - 1), jnp.int32(width))
    return fori_loop(jnp.int32(0), num_calls, take, (cache, first))[1]

"""Scoring: log-probabilities of continuations whose prompt is computed once.

All rows go through the model in one step: those of the prompts, then those of the
continuations, which are forks of them. No cache outlives the step, and a layer's keys
and values are read by this layer alone. So each group of layers has a pool for one
layer at a time, gathered from the rows that the model writes. It makes derivatives
cheap: they flow from the pool to the rows, and nothing the size of a whole cache is
kept for them.

Symbols: Q prompts of at most P tokens, N continuations of at most C tokens, R rows,
N_b blocks, T tokens a block.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.config.cache_config import CacheConfig
from jkv.config.grouped_config import GroupedConfig, as_grouped
from jkv.config.state_config import StateConfig
from jkv.decoding.exact_scores import score_exactly
from jkv.decoding.model.exact import Exact, ExactShape
from jkv.decoding.model.protocol import Model, call_model
from jkv.decoding.model.runner import Runner
from jkv.decoding.texts.prompts import count_tokens, refuse_unknown
from jkv.metadata.requests import Texts, as_prompts
from jkv.state import Batch, Cache
from jkv.state.cache import Role
from jkv.status import UsageError
from jkv.verbs.allocation import allocate
from jkv.verbs.appending import append
from jkv.verbs.attention_plan import plan_attention
from jkv.verbs.forking import fork
from jkv.verbs.initialization import init
from jkv.verbs.lookups import context_lengths, slots


def score(
    model: Model,
    params: Any,
    prompts: Texts,  # i32[Q, P]
    continuations: Texts,  # i32[N, C]
    *,
    config: CacheConfig | StateConfig | GroupedConfig,
    exact: ExactShape = False,
) -> jax.Array:
    """Return the log-probability of each token of continuations after their prompts.

    Each prompt is computed once for all of its continuations: Q * P + N * (C - 1) rows
    in one call of the model, instead of N * (P + C). Differentiable in `params` once
    and backwards (`jax.grad`, `jax.vjp`), as the loss of a policy gradient needs it:
    attention has no `jax.jvp` and no second derivative. Jit it with `model` and
    `config` static. A model with layers that keep a state is called twice, for the
    prompts and for what follows, with all of its states; that has no derivative.

    What `generate` returned for the same prompts can be given as it is:
    `score(model, params, prompts, result.tokens, config=config)`.

    The model is asked for the logits of Q + N * (C - 1) rows, `batch.last_rows`, in one
    array; score fewer at a time where a large vocabulary makes that too many.

    Args:
      model: see `Model`; its `write` and `attend` are those of this step.
      params: the model's weights.
      prompts: i32[Q, P], -1 after each prompt's end, or a list of token ids for each.
      continuations: i32[N, C] likewise, N a multiple of Q: continuation j of prompt i
        is `i * (N / Q) + j`.
      config: the model's sizes and `block_size`; the counts of blocks, sequences and
        tokens are not used, nor are windows and the dtype: all keys and values are
        kept, in float32.
      exact: static; as for `generate`, for the bits that it reported with the same:
        values come from calls of that shape, through a cache with the windows and the
        dtype of `config`. The derivative is that of a score without `exact`.

    Returns:
      f32[N, C], 0 past each continuation's end. NaN for a token with nothing before it,
      the first one after an empty prompt; inside jit also for a token of a continuation
      that is outside the vocabulary, V or above. (What such a token in a prompt does is
      up to the model.)

    Raises:
      ValueError: for texts of a wrong shape or type, or a model whose logits are not
        [B, V], when it is traced; outside jit for a token outside the vocabulary.

    Example:
      >>> import jax, jax.numpy as jnp, jkv
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows] * 50.0, cache
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=1, max_sequences=1, max_context_length=1)
      >>> jkv.score(count_on, None, [[5, 6]], [[7, 8], [7, 9]], config=config).round(2)
      Array([[  0.,   0.],
             [  0., -50.]], dtype=float32)
    """
    asked = as_prompts(prompts, "prompts")
    given = as_prompts(continuations, "continuations")
    _check_counts(asked, given)
    usual = _score_in_one_step(model, params, as_grouped(config), asked, given)
    shape = Exact.of(exact)
    if shape is None:
        return usual
    runner = Runner(model, jax.lax.stop_gradient(params), shape)
    return _with_derivative_of(
        score_exactly(runner, as_grouped(config), asked, given), usual
    )


@jax.custom_vjp
def _with_derivative_of(values: jax.Array, usual: jax.Array) -> jax.Array:
    """Return values, whose derivative is that of others that mean the same."""
    del usual
    return values


_with_derivative_of.defvjp(
    lambda values, usual: (_with_derivative_of(values, usual), None),
    lambda _, cotangent: (jnp.zeros_like(cotangent), cotangent),
)


def _score_in_one_step(
    model: Model,
    params: Any,
    config: GroupedConfig,
    asked: jax.Array,
    given: jax.Array,
) -> jax.Array:
    """Score continuations, i32[N, C], of prompts, i32[Q, P]."""
    if config.state_groups:
        logits = _run_twice(model, params, config, asked, given)
    else:
        cache, batch = _plan(config, asked, given)
        tokens = jnp.concatenate([asked.reshape(-1), given[:, :-1].reshape(-1)])
        logits, _ = call_model(model, params, jnp.maximum(tokens, 0), cache, batch)
    for name, texts in (("prompt", asked), ("continuation", given)):
        refuse_unknown(name, texts, logits.shape[-1])
    return _score_tokens(logits.astype(jnp.float32), count_tokens(asked), given)


def _check_counts(prompts: jax.Array, continuations: jax.Array) -> None:
    """Reject continuations that cannot be dealt to the prompts."""
    num_prompts, num_continuations = prompts.shape[0], continuations.shape[0]
    if not num_prompts or not num_continuations or num_continuations % num_prompts:
        raise ValueError(
            f"continuations must be as many for each prompt, so a multiple of "
            f"{num_prompts}, got {num_continuations}"
        )
    if not prompts.shape[1] or not continuations.shape[1]:
        raise ValueError("prompts and continuations need room for a token at least")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _WritesAndAttends:
    """Refuses what a model may not do with a cache that has one layer at a time."""

    def call(
        self,
        function: Callable[..., Any],
        _cache: Cache,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        role: Role | None,
    ) -> Any:
        """Call `write` and `attend`."""
        if role not in (Role.WRITES, Role.READS):
            raise UsageError(
                f"{function.__name__}: a model that is scored may write and attend only"
            )
        args, kwargs = given
        return function(*args, **kwargs)


def _run_twice(
    model: Model,
    params: Any,
    config: GroupedConfig,
    prompts: jax.Array,
    continuations: jax.Array,
) -> jax.Array:
    """Compute prompts, then forks of them that go on, for logits as of one step.

    A continuation needs the state of its prompt's end, which one call has not yet.
    """
    (num_prompts, width), (count, most) = prompts.shape, continuations.shape
    fed, lengths = most - 1, count_tokens(prompts)
    sizes = _list_sizes(config, prompts, continuations)
    groups = (
        dataclasses.replace(
            group,
            **(sizes.of_states if isinstance(group, StateConfig) else sizes.of_blocks),
        )
        for group in config.groups
    )
    whole = dataclasses.replace(config, groups=tuple(groups), prefix_caching=False)
    cache, opened = allocate(init(whole), jnp.zeros_like(lengths))
    cache, batch = append(
        cache, opened.seq_ids, lengths, max_query_length=width, num_pending=0
    )
    tokens = jnp.maximum(prompts.reshape(-1), 0)
    logits, cache = call_model(model, params, tokens, cache, batch)
    if not fed:
        return logits
    parents = jnp.repeat(opened.seq_ids, count // num_prompts)
    cache, forked = fork(cache, parents)
    counts = jnp.minimum(count_tokens(continuations), fed)
    cache, batch = append(
        cache, forked.seq_ids, counts, max_query_length=fed, num_pending=0
    )
    tokens = jnp.maximum(continuations[:, :-1].reshape(-1), 0)
    every_row = jnp.arange(batch.num_rows, dtype=jnp.int32)
    batch = dataclasses.replace(batch, asked_rows=every_row)
    later, _ = call_model(model, params, tokens, cache, batch)
    return jnp.concatenate([logits, later])


class _ScoredSizes(NamedTuple):
    """The fields of configurations for a step that is scored."""

    of_blocks: dict[str, Any]
    of_states: dict[str, Any]


def _list_sizes(
    config: CacheConfig | GroupedConfig, prompts: jax.Array, continuations: jax.Array
) -> _ScoredSizes:
    """Return the sizes that hold prompts and forks of them."""
    (num_prompts, width), (count, most) = prompts.shape, continuations.shape
    block_size, fed = config.block_size, most - 1
    # A fork owns its tail and what comes behind it.
    own_blocks = -(-(block_size - 1 + fed) // block_size)
    both = dict(max_sequences=num_prompts + count, max_context_length=width + fed)
    of_states = dict(
        both,
        num_snapshots=0,
        snapshot_every=None,
        max_pending=0,
        inputs=None,
        heads_axes=None,
    )
    of_blocks = dict(
        both,
        num_blocks=num_prompts * -(-width // block_size) + count * own_blocks,
        dtype=jnp.float32,
        prefix_caching=False,
        record_tokens=False,
        # The rows of a prompt see what a window would have given back.
        sliding_window=None,
        num_sink_tokens=0,
    )
    return _ScoredSizes(of_blocks, of_states)


def _plan(
    config: CacheConfig | GroupedConfig, prompts: jax.Array, continuations: jax.Array
) -> tuple[Cache, Batch]:
    """Plan the step: the prompts, and forks of them that go on.

    The last token of a continuation is not fed: nothing is asked after it.
    """
    (num_prompts, width), (count, most) = prompts.shape, continuations.shape
    block_size, fed = config.block_size, most - 1
    sizes = _list_sizes(config, prompts, continuations).of_blocks
    given = as_grouped(config)
    groups = tuple(dataclasses.replace(group, **sizes) for group in given.block_groups)
    whole = dataclasses.replace(given, groups=groups, prefix_caching=False)
    num_rows = num_prompts * width + count * fed
    slot_rows = jnp.full((sizes["num_blocks"], block_size), num_rows, jnp.int32)
    lengths = count_tokens(prompts)
    last_rows = jnp.arange(num_prompts, dtype=jnp.int32) * width + lengths - 1
    asked = [jnp.where(lengths > 0, last_rows, num_rows)]

    cache, opened = allocate(init(whole, storage=False), jnp.zeros_like(lengths))
    cache, of_prompts = append(cache, opened.seq_ids, lengths, max_query_length=width)
    slot_rows = _put(slot_rows, of_prompts, first_row=0)
    batches = [of_prompts]
    if fed:
        parents = jnp.repeat(opened.seq_ids, count // num_prompts)
        cache, forked = fork(cache, parents)
        slot_rows = _copy_tails(cache, slot_rows, parents, forked.seq_ids)
        fed_lengths = jnp.minimum(count_tokens(continuations), fed)
        cache, later = append(cache, forked.seq_ids, fed_lengths, max_query_length=fed)
        slot_rows = _put(slot_rows, later, first_row=num_prompts * width)
        batches.append(later)
        asked.append(jnp.arange(num_prompts * width, num_rows, dtype=jnp.int32))
    pools = [init(dataclasses.replace(group, num_layers=1)) for group in groups]
    cache = dataclasses.replace(
        cache,
        storage=tuple(pool.storage[0] for pool in pools),
        watcher=_WritesAndAttends(),
    )
    batch = dataclasses.replace(
        _as_one_step(batches),
        asked_rows=jnp.concatenate(asked),
        slot_rows=slot_rows,
        sizes=cache.sizes,
    )
    return cache, plan_attention(cache, batch)


def _put(slot_rows: jax.Array, batch: Batch, first_row: int) -> jax.Array:
    """Note which row each slot of a step holds, the step's first row being given.

    All groups see everything and are asked for the same, so their slots are the same.
    """
    row = first_row + jnp.arange(batch.num_rows, dtype=jnp.int32)
    return slot_rows.at[batch.slots_in(0)].set(row, mode="drop")


def _copy_tails(
    cache: Cache, slot_rows: jax.Array, parents: jax.Array, children: jax.Array
) -> jax.Array:
    """Let the tails of forks hold the rows that their parents' hold.

    A full last block is shared, and copied to itself.
    """
    last = context_lengths(cache)[children] - 1
    source, target = (
        slots(cache, ids, last, group=0).block_ids for ids in (parents, children)
    )
    tails = slot_rows.at[source].get(mode="clip")
    return slot_rows.at[target].set(tails, mode="drop")


def _as_one_step(batches: list[Batch]) -> Batch:
    """Make one step of several, whose rows follow each other."""
    first, moved = 0, []
    for batch in batches:
        starts = batch.query_starts + first
        moved.append(
            dataclasses.replace(
                batch, query_starts=starts, is_decoding=False, plan=None
            )
        )
        first += batch.num_rows
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *moved)


def _score_tokens(
    logits: jax.Array, lengths: jax.Array, chosen: jax.Array
) -> jax.Array:
    """Return the log-probabilities of tokens under the logits before them.

    Args:
      logits: f32[Q + N * (C - 1), V], of the prompts' ends and of the rows fed.
      lengths: i32[Q], of the prompts.
      chosen: i32[N, C], the continuations.
    """
    num_prompts, (count, most) = lengths.shape[0], chosen.shape
    normalised = jax.nn.log_softmax(logits, axis=-1)
    first = jnp.where(lengths[:, None] > 0, normalised[:num_prompts], jnp.nan)
    of_first = jnp.take_along_axis(first, chosen[:, 0].reshape(num_prompts, -1), axis=1)
    later = normalised[num_prompts:].reshape(count, most - 1, logits.shape[1])
    of_later = jnp.take_along_axis(later, chosen[:, 1:, None], axis=2)[..., 0]
    found = jnp.concatenate([of_first.reshape(count, 1), of_later], axis=1)
    is_token = jnp.arange(most)[None] < count_tokens(chosen)[:, None]
    return jnp.where(is_token, found, 0.0)

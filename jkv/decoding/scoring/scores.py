"""Scoring: log-probabilities with shared prefixes computed once.

A tree is scored directly. Prompts and continuations form a tree of two levels without
the last tokens.

Symbols: Q prompts of at most P tokens, N continuations of at most C tokens; a tree of R
rows.
"""

from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import explains_arguments
from jkv.config.cache_config import CacheConfig
from jkv.config.grouped_config import GroupedConfig, as_grouped
from jkv.config.state_config import StateConfig
from jkv.decoding.model.steps import Exact, ExactShape, Model
from jkv.decoding.scoring.exact_scores import score_exactly
from jkv.decoding.scoring.layout import SegmentTable, find_rows, find_segment_table
from jkv.decoding.scoring.levels import (
    check_counts,
    list_levels,
    logprobs_at,
    run_levels,
    score_two_levels,
)
from jkv.decoding.scoring.one_call import run_tree
from jkv.decoding.scoring.scored import Scored
from jkv.decoding.sequences.prompts import count_tokens
from jkv.decoding.sequences.spans import Spans
from jkv.decoding.sequences.trajectory_tree import TrajectoryTree, check_tree, is_known
from jkv.metadata.requests import IntegerRows, as_prompts
from jkv.status import UsageError

Config = CacheConfig | StateConfig | GroupedConfig


@overload
def score(
    model: Model,
    params: Any,
    prompts: TrajectoryTree,
    *,
    config: Config,
    mesh: jax.sharding.Mesh | None = ...,
    heads: str | None = ...,
) -> jax.Array: ...


@overload
def score(
    model: Model,
    params: Any,
    prompts: IntegerRows,
    continuations: IntegerRows,
    *,
    config: Config,
    spans: IntegerRows | None = ...,
    exact: ExactShape = ...,
    mesh: jax.sharding.Mesh | None = ...,
    heads: str | None = ...,
) -> jax.Array: ...


@explains_arguments
def score(
    model: Model,
    params: Any,
    prompts: IntegerRows | TrajectoryTree,  # i32[Q, P]
    continuations: IntegerRows | None = None,  # i32[N, C]
    *,
    config: Config,
    spans: IntegerRows | None = None,  # i32[Q, P]
    exact: ExactShape = False,
    mesh: jax.sharding.Mesh | None = None,
    heads: str | None = None,
) -> jax.Array:
    """Return the log-probability of each token of continuations, or of a tree.

    Each prompt is computed once for all of its continuations: Q * P + N * (C - 1) rows
    in one call of the model, instead of N * (P + C). A `TrajectoryTree` of any depth is
    R rows in one call: each token once, in any number of sequences. Reverse-mode
    differentiable once in `params` (`jax.grad`, `jax.vjp`), as for a policy gradient
    loss; attention supports neither `jax.jvp` nor second derivatives.
    `jkv.jitted.score` is jitted with `model` and `config` static. A model with
    recurrent-state layers is called once per level (prompts and continuations are two),
    and its states have no derivative; the tree must be concrete at trace time.

    The completions of `generate` for the same prompts can be passed directly:
    `score(model, params, prompts, result.tokens, config=config)`.

    The model returns the logits of Q + N * (C - 1) rows, or of the R rows of a tree,
    `batch.last_rows`, in one array; with a large vocabulary, score fewer at a time
    (`jkv.trees.split`).

    Args:
      model: see `Model`; its `write` and `attend` are those of this step.
      params: the model's weights.
      prompts: i32[Q, P], -1 past the end of each, or a list of token ids for each. Or a
        `TrajectoryTree`, without continuations.
      continuations: i32[N, C] likewise, N a multiple of Q: continuation j of prompt i
        is `i * (N / Q) + j`.
      config: the model's sizes and `block_size`; counts of blocks, sequences and
        tokens, windows and dtypes are ignored: all keys and values are kept, in
        float32.
      spans: i32[Q, P], the last position that each token of a prompt attends to, -1 for
        a causal token, as for `generate`. Not for trees, and not with `exact`.
      exact: static; as for `generate`, for log-probabilities bit-identical to its own:
        calls have that shape, through a cache with the windows and dtypes of `config`.
        The derivative is that of a score without `exact`. Not for trees.
      mesh: static; the mesh of the weights, if their heads are sharded.
      heads: static; the mesh axis of the heads, as for `jkv.init`: each device attends
        with its own heads, without communication.

    Returns:
      f32[N, C], 0 past the end of each continuation. For a tree f32[R]: the
      log-probability of each row's token given its prefix, 0 in a row without a token.
      A token without a prefix has 0: the first one after an empty prompt, and the first
        one of each root.

      Inside jit NaN for a continuation or tree token outside of the vocabulary, and for
      the tokens of segments that break an invariant of `TrajectoryTree`, and of their
      descendants. (The effect of an invalid token on later ones depends on the model.)

    Raises:
      ValueError: at trace time, for arguments of a wrong shape or type, a model with
        logits other than [B, V], or kv heads that an axis does not divide; outside jit,
        for a token outside of the vocabulary or a tree that breaks an invariant.

    Example:
      >>> import jax, jax.numpy as jnp, jkv
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows] * 50.0, cache
      >>> config = jkv.CacheConfig.toy()
      >>> jkv.score(count_on, None, [[5, 6]], [[7, 8], [7, 9]], config=config).round(2)
      Array([[  0.,   0.],
             [  0., -50.]], dtype=float32)

      A prompt, two samples, and a tool result after the second one:

      >>> segments = [[5, 6], [7, 8], [7, 9], [10]]
      >>> tree = jkv.TrajectoryTree.of(segments, parents=[-1, 0, 0, 2])
      >>> jkv.score(count_on, None, tree, config=config).round(2).tolist()
      [0.0, 0.0, 0.0, 0.0, 0.0, -50.0, 0.0]
    """
    scored = Scored(model, params, as_grouped(config), mesh, heads)
    scored.check()
    shape = Exact.of(exact)
    if isinstance(prompts, TrajectoryTree):
        if shape is not None:
            raise UsageError("exact is not supported for trees; omit it")
        if spans is not None:
            raise UsageError("spans are not supported for trees; omit them")
        if continuations is not None:
            raise UsageError(
                "a tree takes no continuations: score(model, params, tree, config=...)"
            )
        return _score_tree(scored, prompts)
    if continuations is None:
        raise UsageError(
            "continuations must be given, unless prompts is a TrajectoryTree"
        )
    prompt_rows = as_prompts(prompts, "prompts")
    given = as_prompts(continuations, "continuations")
    check_counts(prompt_rows, given)
    found = None
    if spans is not None:
        found = Spans.of(spans, prompt_rows, None, cacheable=False)
    usual = score_two_levels(scored, prompt_rows, given, found)
    if found is not None:
        each = len(given) // len(prompt_rows)
        is_wrong = jnp.repeat(found.are_malformed(count_tokens(prompt_rows)), each)
        usual = jnp.where(is_wrong[:, None] & (given >= 0), jnp.nan, usual)
    if shape is None:
        return usual
    if spans is not None:
        raise UsageError("spans are not supported with exact; omit one of them")
    scored = scored._replace(params=jax.lax.stop_gradient(params))
    values = score_exactly(scored, shape, prompt_rows, given)
    return _with_derivative_of(values, usual)


@jax.custom_vjp
def _with_derivative_of(values: jax.Array, usual: jax.Array) -> jax.Array:
    """Return `values` with the derivative of `usual`."""
    del usual
    return values


_with_derivative_of.defvjp(
    lambda values, usual: (_with_derivative_of(values, usual), None),
    lambda _, cotangent: (jnp.zeros_like(cotangent), cotangent),
)


def _score_tree(scored: Scored, tree: TrajectoryTree) -> jax.Array:
    """Return the log-probability of each row's token, f32[R]."""
    check_tree(tree)
    if not tree.num_rows:
        raise UsageError("a tree must have at least one row")
    if scored.config.state_groups:
        levels = list_levels(tree)
        found = run_levels(scored, tree, levels)
        order = np.concatenate([level.rows for level in levels])
        empty = jnp.zeros((tree.num_rows, found[0].shape[1]), found[0].dtype)
        logits = empty.at[order].set(jnp.concatenate(found))
        table = find_segment_table(tree)
    else:
        every_row = jnp.arange(tree.num_rows, dtype=jnp.int32)
        logits, layout = run_tree(scored, tree, every_row)
        table = layout.table
    _refuse_unknown_rows(tree, logits.shape[-1])
    return _score_rows(logits.astype(jnp.float32), table, tree)


def _score_rows(
    logits: jax.Array, table: SegmentTable, tree: TrajectoryTree
) -> jax.Array:
    """Return the log-probability of each row's token given its prefix, f32[R]."""
    segment = jnp.clip(tree.segments, 0, tree.num_segments - 1)
    row = jnp.arange(tree.num_rows, dtype=jnp.int32)
    before = table.starts[segment] + row - table.first_rows[segment] - 1
    is_token = (tree.tokens >= 0) & (tree.segments >= 0)
    follows = is_token & (before >= 0)
    rows = find_rows(table, segment, jnp.maximum(before, 0))
    found = logprobs_at(logits, rows, tree.tokens, follows)
    return jnp.where(is_token & ~table.is_sound[segment], jnp.nan, found)


def _refuse_unknown_rows(tree: TrajectoryTree, vocabulary: int) -> None:
    """Raise UsageError for a token outside of the vocabulary, outside jit."""
    if not is_known(tree):
        return
    tokens, segments = np.asarray(tree.tokens), np.asarray(tree.segments)
    for row in np.flatnonzero(tokens >= vocabulary):
        place = row - np.flatnonzero(segments == segments[row])[0]
        raise UsageError(
            f"segment {segments[row]} has {tokens[row]} at position {place}; the "
            f"model's logits are of token ids from 0 to {vocabulary - 1}"
        )

"""Scoring: log-probabilities of texts whose common beginnings are computed once.

A tree is scored as it is. Prompts and continuations are a tree of two levels, whose
last tokens need not be computed.

Symbols: Q prompts of at most P tokens, N continuations of at most C tokens; a tree of R
rows.
"""

from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.cache_config import CacheConfig
from jkv.config.grouped_config import GroupedConfig, as_grouped
from jkv.config.state_config import StateConfig
from jkv.decoding.model.protocol import Model
from jkv.decoding.scoring.layout import Places, find_places, find_rows
from jkv.decoding.scoring.levels import Level, list_levels, run_levels
from jkv.decoding.scoring.one_call import run_tree
from jkv.decoding.texts.prompts import count_tokens, refuse_unknown
from jkv.decoding.texts.text_tree import TextTree, check_tree, is_known
from jkv.metadata.requests import Texts, as_prompts
from jkv.status import UsageError

Config = CacheConfig | StateConfig | GroupedConfig


@overload
def score(
    model: Model, params: Any, prompts: TextTree, *, config: Config
) -> jax.Array: ...


@overload
def score(
    model: Model, params: Any, prompts: Texts, continuations: Texts, *, config: Config
) -> jax.Array: ...


def score(
    model: Model,
    params: Any,
    prompts: Texts | TextTree,  # i32[Q, P]
    continuations: Texts | None = None,  # i32[N, C]
    *,
    config: Config,
) -> jax.Array:
    """Return the log-probability of each token of continuations, or of a whole tree.

    Each prompt is computed once for all of its continuations: Q * P + N * (C - 1) rows
    in one call of the model, instead of N * (P + C). A `TextTree` of any depth is R
    rows in one call: each of its tokens once, however many texts it is part of.
    Differentiable in `params` once and backwards (`jax.grad`, `jax.vjp`), as the loss
    of a policy gradient needs it: attention has no `jax.jvp` and no second derivative.
    Jit it with `model` and `config` static. A model with layers that keep a state is
    called once for each level (prompts and continuations are two), with all of its
    states; that has no derivative, and the tree must be known when it is traced.

    What `generate` returned for the same prompts can be given as it is:
    `score(model, params, prompts, result.tokens, config=config)`.

    The model is asked for the logits of Q + N * (C - 1) rows, or of the R rows of a
    tree, `batch.last_rows`, in one array; score fewer at a time where a large
    vocabulary makes that too many (`jkv.trees.split`).

    Args:
      model: see `Model`; its `write` and `attend` are those of this step.
      params: the model's weights.
      prompts: i32[Q, P], -1 after each prompt's end, or a list of token ids for each.
        Or a `TextTree`, and no continuations.
      continuations: i32[N, C] likewise, N a multiple of Q: continuation j of prompt i
        is `i * (N / Q) + j`.
      config: the model's sizes and `block_size`; the counts of blocks, sequences and
        tokens are not used, nor are windows and the dtype: all keys and values are
        kept, in float32.

    Returns:
      f32[N, C], 0 past each continuation's end. Of a tree f32[R]: the log-probability
      of each row's token after the text before it, 0 in a row without a token.

      NaN for a token with nothing before it: the first one after an empty prompt, and
      the first one of each root of a tree. Inside jit also for a token of a
      continuation or a tree that is outside the vocabulary, V or above, and for the
      tokens of segments that break an invariant of `TextTree`, and of their
      descendants. (What a token outside the vocabulary does to those behind it is up to
      the model.)

    Raises:
      ValueError: for texts of a wrong shape or type, or a model whose logits are not
        [B, V], when it is traced; outside jit for a token outside the vocabulary, and
        for a tree that breaks an invariant.

    Example:
      >>> import jax, jax.numpy as jnp, jkv
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows] * 50.0, cache
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=1, max_sequences=1, max_context_length=1)
      >>> jkv.score(count_on, None, [[5, 6]], [[7, 8], [7, 9]], config=config).round(2)
      Array([[  0.,   0.],
             [  0., -50.]], dtype=float32)

      The prompt, its two samples, and what a tool answered to the second one:

      >>> tree = jkv.TextTree.of([[5, 6], [7, 8], [7, 9], [10]], parents=[-1, 0, 0, 2])
      >>> jkv.score(count_on, None, tree, config=config).round(2).tolist()
      [nan, 0.0, 0.0, 0.0, 0.0, -50.0, 0.0]
    """
    grouped = as_grouped(config)
    if isinstance(prompts, TextTree):
        if continuations is not None:
            raise UsageError(
                "a tree has its continuations: score(model, params, tree, config=...)"
            )
        return _score_tree(model, params, grouped, prompts)
    if continuations is None:
        raise UsageError("prompts need continuations; only a jkv.TextTree has none")
    asked = as_prompts(prompts, "prompts")
    given = as_prompts(continuations, "continuations")
    _check_counts(asked, given)
    if grouped.state_groups:
        logits = _run_two_levels(model, params, grouped, asked, given)
    else:
        tree = _join(asked, given)
        rows = _list_asked_rows(asked, tree.num_rows)
        logits, _ = run_tree(model, params, grouped, tree, rows)
    for name, texts in (("prompt", asked), ("continuation", given)):
        refuse_unknown(name, texts, logits.shape[-1])
    return _score_tokens(logits.astype(jnp.float32), count_tokens(asked), given)


def _score_tree(
    model: Model, params: Any, config: GroupedConfig, tree: TextTree
) -> jax.Array:
    """Return the log-probability of each row's token, f32[R]."""
    check_tree(tree)
    if not tree.num_rows:
        raise UsageError("a tree without a row has nothing to score")
    if config.state_groups:
        levels = list_levels(tree)
        found = run_levels(model, params, config, tree, levels)
        order = np.concatenate([level.rows for level in levels])
        empty = jnp.zeros((tree.num_rows, found[0].shape[1]), found[0].dtype)
        logits = empty.at[order].set(jnp.concatenate(found))
        places = find_places(tree)
    else:
        every_row = jnp.arange(tree.num_rows, dtype=jnp.int32)
        logits, layout = run_tree(model, params, config, tree, every_row)
        places = layout.places
    _refuse_unknown_rows(tree, logits.shape[-1])
    return _score_rows(logits.astype(jnp.float32), places, tree)


def _score_rows(logits: jax.Array, places: Places, tree: TextTree) -> jax.Array:
    """Return the log-probabilities of rows' tokens under the logits before them.

    Args:
      logits: f32[R, V].
      places: where the segments stand.
      tree: R rows.
    """
    segment = jnp.clip(tree.segments, 0, tree.num_segments - 1)
    row = jnp.arange(tree.num_rows, dtype=jnp.int32)
    before = places.starts[segment] + row - places.first_rows[segment] - 1
    rows = find_rows(places, segment, jnp.maximum(before, 0))
    normalised = jax.nn.log_softmax(logits, axis=-1)
    found = normalised.at[rows, jnp.maximum(tree.tokens, 0)].get(
        mode="fill", fill_value=jnp.nan
    )
    found = jnp.where((before >= 0) & places.is_sound[segment], found, jnp.nan)
    is_token = (tree.tokens >= 0) & (tree.segments >= 0)
    return jnp.where(is_token, found, 0.0)


def _refuse_unknown_rows(tree: TextTree, vocabulary: int) -> None:
    """Refuse a tree with a token that the model does not know, outside of jit."""
    if not is_known(tree):
        return
    tokens, segments = np.asarray(tree.tokens), np.asarray(tree.segments)
    for row in np.flatnonzero(tokens >= vocabulary):
        place = row - np.flatnonzero(segments == segments[row])[0]
        raise UsageError(
            f"segment {segments[row]} has {tokens[row]} at position {place}; the "
            f"model's logits are of token ids from 0 to {vocabulary - 1}"
        )


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


def _join(prompts: jax.Array, continuations: jax.Array) -> TextTree:
    """Return prompts and continuations as a tree, with a row for each place.

    The last token of a continuation is not in it: nothing is asked after it.
    """
    (num_prompts, width), (count, most) = prompts.shape, continuations.shape
    fed = most - 1
    # Continuations of one token bring no rows, and need no segments.
    count = count if fed else 0
    each = count // num_prompts
    texts = (prompts, continuations[:count, :fed])
    firsts, tokens, segments = (0, num_prompts), [], []
    for first, text in zip(firsts, texts, strict=True):
        column = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
        is_token = column < count_tokens(text)[:, None]
        number = first + jnp.arange(text.shape[0], dtype=jnp.int32)[:, None]
        tokens.append(jnp.where(is_token, text, -1).reshape(-1))
        segments.append(jnp.where(is_token, number, -1).reshape(-1))
    roots = np.full(num_prompts, -1, np.int32)
    children = np.repeat(np.arange(num_prompts, dtype=np.int32), each)
    return TextTree(
        tokens=jnp.concatenate(tokens),
        segments=jnp.concatenate(segments),
        parents=jnp.asarray(np.concatenate([roots, children])),
        max_length=width + fed,
    )


def _list_asked_rows(prompts: jax.Array, num_rows: int) -> jax.Array:
    """Return the rows of prompts' ends, R for an empty one, and all that follow."""
    num_prompts, width = prompts.shape
    lengths = count_tokens(prompts)
    last = jnp.arange(num_prompts, dtype=jnp.int32) * width + lengths - 1
    later = jnp.arange(num_prompts * width, num_rows, dtype=jnp.int32)
    return jnp.concatenate([jnp.where(lengths > 0, last, num_rows), later])


def _run_two_levels(
    model: Model,
    params: Any,
    config: GroupedConfig,
    prompts: jax.Array,
    continuations: jax.Array,
) -> jax.Array:
    """Compute prompts, then forks of them that go on, for logits as of one step."""
    tree, (num_prompts, width) = _join(prompts, continuations), prompts.shape
    rows = np.arange(tree.num_rows, dtype=np.int32)
    segments = np.arange(tree.num_segments, dtype=np.int32)
    first = num_prompts * width
    levels = [Level(segments[:num_prompts], None, rows[:first], width, asks_all=False)]
    children = segments[num_prompts:]
    if len(children):
        parents = (children - num_prompts) // (len(children) // num_prompts)
        fed = continuations.shape[1] - 1
        levels.append(Level(children, parents, rows[first:], fed, asks_all=True))
    return jnp.concatenate(run_levels(model, params, config, tree, levels))


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

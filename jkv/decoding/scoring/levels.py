"""A tree in one call of the model for each of its levels.

Layers with a state need the state of a parent's end before a child begins, which one
call has not yet. So the roots come first, then forks of them that go on, and so on,
with all of the states in a cache. Which segments make a level must be known when this
is traced: a call has a static number of rows.

Prompts and continuations are a tree of two levels, whose last tokens are not computed:
Q prompts of at most P tokens, N continuations of at most C tokens.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.decoding.scoring.one_call import run_tree
from jkv.decoding.scoring.scored import Scored, resize_for_tree
from jkv.decoding.texts.prompts import count_tokens, refuse_unknown
from jkv.decoding.texts.text_tree import TextTree, is_known, list_places, measure
from jkv.indexing import gather
from jkv.status import UsageError
from jkv.verbs.allocation import allocate
from jkv.verbs.appending import append
from jkv.verbs.forking import fork


class Level(NamedTuple):
    """Segments whose parents were all computed before."""

    segments: np.ndarray[Any, Any]  # i32[n], their numbers
    parents: np.ndarray[Any, Any] | None  # i32[n], those of their parents; None: roots
    rows: np.ndarray[Any, Any]  # i32[r], their rows in the tree, segment by segment
    # Rows of each segment, where all have as many; None where each has its tokens'.
    width: int | None
    asks_all: bool  # whether the logits of all rows are asked for, or each last one's


def run_levels(scored: Scored, tree: TextTree, levels: list[Level]) -> list[jax.Array]:
    """Compute every row of a tree once, level by level; returns each one's logits."""
    cache = scored.init(resize_for_tree(scored.config, tree), tree)
    seq_ids = jnp.full((tree.num_segments,), -1, jnp.int32)
    lengths, found = tree.lengths, []
    for level in levels:
        if level.parents is None:
            cache, opened = allocate(cache, jnp.zeros_like(level.segments))
            ids = opened.seq_ids
        else:
            cache, forked = fork(cache, seq_ids[level.parents])
            ids = forked.seq_ids
        seq_ids = seq_ids.at[level.segments].set(ids)
        cache, batch = append(
            cache,
            ids,
            lengths[level.segments],
            capacity=len(level.rows) if level.width is None else None,
            max_query_length=level.width,
            num_pending=0,
        )
        if level.asks_all:
            every_row = jnp.arange(batch.num_rows, dtype=jnp.int32)
            batch = dataclasses.replace(batch, asked_rows=every_row)
        logits, cache = scored.call(tree.tokens[level.rows], cache, batch)
        found.append(logits)
    return found


def list_levels(tree: TextTree) -> list[Level]:
    """Return the levels of a known tree, whose rows are all asked for."""
    if not is_known(tree):
        raise UsageError(
            "a model with layers that keep a state is called once for each level of a "
            "tree, so the tree must be known when score is traced: call it outside "
            "jit, or let the jitted function close over the tree"
        )
    parents, measures = np.asarray(tree.parents), measure(tree)
    depths = np.zeros_like(parents)
    for segment, parent in enumerate(parents):
        depths[segment] = depths[parent] + 1 if parent >= 0 else 0
    levels = []
    for depth in range(depths.max() + 1):
        segments = np.flatnonzero(depths == depth).astype(np.int32)
        rows = [
            measures.first_rows[s] + np.arange(measures.lengths[s]) for s in segments
        ]
        levels.append(
            Level(
                segments=segments,
                parents=parents[segments] if depth else None,
                rows=np.concatenate(rows).astype(np.int32),
                width=None,
                asks_all=True,
            )
        )
    return levels


def check_counts(prompts: jax.Array, continuations: jax.Array) -> None:
    """Reject continuations that cannot be dealt to the prompts."""
    num_prompts, num_continuations = prompts.shape[0], continuations.shape[0]
    if not num_prompts or not num_continuations or num_continuations % num_prompts:
        raise ValueError(
            f"continuations must be as many for each prompt, so a multiple of "
            f"{num_prompts}, got {num_continuations}"
        )
    if not prompts.shape[1] or not continuations.shape[1]:
        raise ValueError("prompts and continuations need room for a token at least")


def score_two_levels(
    scored: Scored, prompts: jax.Array, continuations: jax.Array
) -> jax.Array:
    """Score continuations, i32[N, C], of prompts, i32[Q, P]."""
    if scored.config.state_groups:
        logits = _run_two_levels(scored, prompts, continuations)
    else:
        tree = _join(prompts, continuations)
        rows = _list_asked_rows(prompts, tree.num_rows)
        logits, _ = run_tree(scored, tree, rows)
    for name, texts in (("prompt", prompts), ("continuation", continuations)):
        refuse_unknown(name, texts, logits.shape[-1])
    lengths = count_tokens(prompts)
    return _score_tokens(logits.astype(jnp.float32), lengths, continuations)


def _join(prompts: jax.Array, continuations: jax.Array) -> TextTree:
    """Return prompts and continuations as a tree, with a row for each place.

    The last token of a continuation is not in it: nothing is asked after it.
    """
    (num_prompts, width), (count, most) = prompts.shape, continuations.shape
    fed = most - 1
    # Continuations of one token bring no rows, and need no segments.
    count = count if fed else 0
    of_prompts = list_places(prompts)
    rest = list_places(continuations[:count, :fed])
    owners = jnp.where(rest.owners >= 0, rest.owners + num_prompts, -1)
    roots = np.full(num_prompts, -1, np.int32)
    children = np.repeat(np.arange(num_prompts, dtype=np.int32), count // num_prompts)
    return TextTree(
        tokens=jnp.concatenate([of_prompts.tokens, rest.tokens]),
        segments=jnp.concatenate([of_prompts.owners, owners]),
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
    scored: Scored, prompts: jax.Array, continuations: jax.Array
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
    return jnp.concatenate(run_levels(scored, tree, levels))


def _score_tokens(
    logits: jax.Array, lengths: jax.Array, chosen: jax.Array
) -> jax.Array:
    """Return log-probabilities of continuations, i32[N, C], under the logits before.

    Those are f32[Q + N * (C - 1), V], of the prompts' ends and of the rows fed.
    """
    num_prompts, (count, most) = lengths.shape[0], chosen.shape
    number = jnp.arange(count, dtype=jnp.int32)[:, None]
    column = jnp.arange(most, dtype=jnp.int32)[None]
    prompt = number // (count // num_prompts)
    fed = num_prompts + number * (most - 1) + column - 1
    is_token = column < count_tokens(chosen)[:, None]
    follows = is_token & ((column > 0) | (lengths[prompt] > 0))
    return logprobs_at(logits, jnp.where(column > 0, fed, prompt), chosen, follows)


def logprobs_at(
    logits: jax.Array,  # f32[A, V]
    rows: jax.Array,  # i32[...], whose logits are before a token
    tokens: jax.Array,  # i32[...]
    follows: jax.Array,  # bool[...], which tokens are asked for
) -> jax.Array:
    """Return the log-probabilities of tokens, f32[...], 0 of those not asked for."""
    at = jnp.where(follows, rows, 0), jnp.where(follows, tokens, 0)
    normalised = jax.nn.log_softmax(logits, axis=-1)
    found = gather(normalised, at, fill=jnp.nan)
    return jnp.where(follows, found, 0.0)

"""Scoring of a tree level by level, one call of the model each.

Recurrent-state layers need the state at a parent's end before a child starts, so roots
come first, then their forks, and so on, with all states in a cache. The segments of a
level must be known at trace time: a call has a static number of rows.

Prompts and continuations form a tree of two levels without the last tokens: Q prompts
of at most P tokens, N continuations of at most C tokens.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.decoding.scoring.one_call import run_tree
from jkv.decoding.scoring.scored import Scored, resize_for_tree
from jkv.decoding.sequences.prompts import count_tokens, refuse_unknown
from jkv.decoding.sequences.spans import Spans
from jkv.decoding.sequences.trajectory_tree import (
    TrajectoryTree,
    is_known,
    list_places,
    measure,
)
from jkv.masks import CAUSAL, Mask, SpanMask
from jkv.operations import gather
from jkv.status import UsageError
from jkv.verbs.allocation import allocate
from jkv.verbs.appending import append
from jkv.verbs.branching import fork


class Level(NamedTuple):
    """Segments of one depth; their parents are already computed."""

    segments: np.ndarray[Any, Any]  # i32[n], their numbers
    parents: np.ndarray[Any, Any] | None  # i32[n], their parents; None: roots
    rows: np.ndarray[Any, Any]  # i32[r], their rows in the tree, segment by segment
    # Rows per segment if equal; None: as many as its tokens.
    width: int | None
    all_logits: bool  # return the logits of all rows, else of last rows
    mask: Mask = CAUSAL  # of its rows
    max_span: int | None = None


def run_levels(
    scored: Scored, tree: TrajectoryTree, levels: list[Level]
) -> list[jax.Array]:
    """Compute every row of a tree once; return the logits of each level."""
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
            mask=level.mask,
            max_span=level.max_span,
        )
        if level.all_logits:
            every_row = jnp.arange(batch.num_rows, dtype=jnp.int32)
            batch = dataclasses.replace(batch, logit_rows=every_row)
        logits, cache = scored.call(tree.tokens[level.rows], cache, batch)
        found.append(logits)
    return found


def list_levels(tree: TrajectoryTree) -> list[Level]:
    """Return the levels of a concrete tree, with logits for all rows."""
    if not is_known(tree):
        raise UsageError(
            "a tree must be concrete to score a model with recurrent states, which is "
            "called once per level, got a traced one; call score outside "
            "jit, or close over the tree in the jitted function"
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
                all_logits=True,
            )
        )
    return levels


def check_counts(prompts: jax.Array, continuations: jax.Array) -> None:
    """Check that continuations can be divided evenly among prompts."""
    num_prompts, num_continuations = prompts.shape[0], continuations.shape[0]
    if not num_prompts or not num_continuations or num_continuations % num_prompts:
        raise ValueError(
            f"continuations must have a multiple of {num_prompts} rows, as many for "
            f"each prompt, got {num_continuations}"
        )
    if not prompts.shape[1] or not continuations.shape[1]:
        raise ValueError("prompts and continuations must have at least one column")


def score_two_levels(
    scored: Scored,
    prompts: jax.Array,
    continuations: jax.Array,
    spans: Spans | None = None,  # of the prompts
) -> jax.Array:
    """Score continuations, i32[N, C], of prompts, i32[Q, P]."""
    if scored.config.state_groups:
        logits = _run_two_levels(scored, prompts, continuations, spans)
    else:
        tree = _join(prompts, continuations)
        rows, mask, longest = _list_scored_rows(prompts, tree.num_rows), None, None
        if spans is not None:
            # The rows of prompts come first.
            more, longest = (0, tree.num_rows - prompts.size), spans.longest
            ends = jnp.pad(spans.ends.reshape(-1), more, constant_values=-1)
            mask = SpanMask(ends)
        logits, _ = run_tree(scored, tree, rows, mask, longest)
    for name, ids in (("prompt", prompts), ("continuation", continuations)):
        refuse_unknown(name, ids, logits.shape[-1])
    lengths = count_tokens(prompts)
    return _score_tokens(logits.astype(jnp.float32), lengths, continuations)


def _join(prompts: jax.Array, continuations: jax.Array) -> TrajectoryTree:
    """Return prompts and continuations as a tree, with a row for each entry.

    The last token of a continuation is omitted: its logits are not needed.
    """
    (num_prompts, width), (count, most) = prompts.shape, continuations.shape
    fed = most - 1
    # Continuations of one token add no rows and no segments.
    count = count if fed else 0
    of_prompts = list_places(prompts)
    rest = list_places(continuations[:count, :fed])
    owners = jnp.where(rest.owners >= 0, rest.owners + num_prompts, -1)
    roots = np.full(num_prompts, -1, np.int32)
    children = np.repeat(np.arange(num_prompts, dtype=np.int32), count // num_prompts)
    return TrajectoryTree(
        tokens=jnp.concatenate([of_prompts.tokens, rest.tokens]),
        segments=jnp.concatenate([of_prompts.owners, owners]),
        parents=jnp.asarray(np.concatenate([roots, children])),
        max_length=width + fed,
    )


def _list_scored_rows(prompts: jax.Array, num_rows: int) -> jax.Array:
    """Return the last row of each prompt, R for an empty one, and all later rows."""
    num_prompts, width = prompts.shape
    lengths = count_tokens(prompts)
    last = jnp.arange(num_prompts, dtype=jnp.int32) * width + lengths - 1
    later = jnp.arange(num_prompts * width, num_rows, dtype=jnp.int32)
    return jnp.concatenate([jnp.where(lengths > 0, last, num_rows), later])


def _run_two_levels(
    scored: Scored,
    prompts: jax.Array,
    continuations: jax.Array,
    spans: Spans | None,
) -> jax.Array:
    """Compute prompts, then their forks; return logits in the order of one step."""
    tree, (num_prompts, width) = _join(prompts, continuations), prompts.shape
    rows = np.arange(tree.num_rows, dtype=np.int32)
    segments = np.arange(tree.num_segments, dtype=np.int32)
    first = num_prompts * width
    levels = [
        Level(segments[:num_prompts], None, rows[:first], width, all_logits=False)
    ]
    if spans is not None:
        mask = SpanMask(spans.ends.reshape(-1))
        levels = [levels[0]._replace(mask=mask, max_span=spans.longest)]
    children = segments[num_prompts:]
    if len(children):
        parents = (children - num_prompts) // (len(children) // num_prompts)
        fed = continuations.shape[1] - 1
        levels.append(Level(children, parents, rows[first:], fed, all_logits=True))
    return jnp.concatenate(run_levels(scored, tree, levels))


def _score_tokens(
    logits: jax.Array, lengths: jax.Array, chosen: jax.Array
) -> jax.Array:
    """Return log-probabilities of continuations, i32[N, C].

    `logits` are f32[Q + N * (C - 1), V], of the prompts' last rows and of the fed rows.
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
    rows: jax.Array,  # i32[...], row with the logits of each token
    tokens: jax.Array,  # i32[...]
    follows: jax.Array,  # bool[...], tokens to score
) -> jax.Array:
    """Return the log-probabilities of tokens, f32[...], 0 where not scored."""
    at = jnp.where(follows, rows, 0), jnp.where(follows, tokens, 0)
    normalised = jax.nn.log_softmax(logits, axis=-1)
    found = gather(normalised, at, fill=jnp.nan)
    return jnp.where(follows, found, 0.0)

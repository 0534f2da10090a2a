"""A tree in one call of the model for each of its levels.

Layers with a state need the state of a parent's end before a child begins, which one
call has not yet. So the roots come first, then forks of them that go on, and so on,
with all of the states in a cache. Which segments make a level must be known when this
is traced: a call has a static number of rows.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.decoding.scoring.scored import Scored, resize_for_tree
from jkv.decoding.texts.text_tree import TextTree, is_known, measure
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
    """Compute every row of a tree once, by levels that have all of its segments.

    Returns the logits of each level, [A, V]: of all of its rows, or one for each
    segment.
    """
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

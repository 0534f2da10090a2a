"""Resize trajectory trees: pad them to share a compiled program, or partition them.

A part is a tree with a bounded number of rows, for limited memory: some segments and
their ancestors, which are computed again. Segments are assigned depth first, small
branches before large ones, so that a part's segments share many ancestors and the
longest branch is repeated least. The losses and gradients of the parts add up to the
tree's, since each token counts in one part.

"Tree Training" (https://arxiv.org/abs/2511.00413) partitions trees under a memory bound
in this way.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import explains_arguments
from jkv.decoding.sequences.trajectory_tree import (
    NO_PARENT,
    TrajectoryTree,
    check_tree,
    is_known,
    measure,
)
from jkv.metadata.requests import check_counts
from jkv.status import UsageError


@explains_arguments
def pad(
    tree: TrajectoryTree,
    *,
    num_rows: int | None = None,
    num_segments: int | None = None,
    max_length: int | None = None,
) -> TrajectoryTree:
    """Pad a tree with empty rows and empty roots.

    Args:
      tree: of sizes up to the new ones.
      num_rows: R of the result; static, None for the tree's own.
      num_segments: S of the result; static, None for the tree's own.
      max_length: most tokens of a trajectory; static, None for the tree's own.

    Returns:
      The tree, with the same trajectories and numbers of segments and rows.

    Raises:
      ValueError: for a size below the tree's own.

    Example:
      >>> import jkv
      >>> tree = jkv.TrajectoryTree.of([[5, 6], [7]], parents=[-1, 0])
      >>> tree = jkv.trees.pad(tree, num_rows=5, num_segments=3, max_length=8)
      >>> tree.tokens.tolist(), tree.parents.tolist()
      ([5, 6, 7, -1, -1], [-1, 0, -1])
    """
    sizes = {
        "num_rows": (num_rows, tree.num_rows),
        "num_segments": (num_segments, tree.num_segments),
        "max_length": (max_length, tree.max_length),
    }
    for name, (wanted, own) in sizes.items():
        if wanted is not None and wanted < own:
            raise UsageError(f"{name} must be >= {own}, the tree's own, got {wanted}")
    rows, segments, length = (
        own if wanted is None else wanted for wanted, own in sizes.values()
    )
    xp: Any = np if is_known(tree) else jnp

    def fill(array: jax.Array, size: int) -> jax.Array:
        missing = (0, size - array.shape[0])
        return jnp.asarray(xp.pad(array, missing, constant_values=-1))

    return TrajectoryTree(
        tokens=fill(tree.tokens, rows),
        segments=fill(tree.segments, rows),
        parents=fill(tree.parents, segments),
        max_length=length,
    )


class TreeParts(NamedTuple):
    """P parts of a tree, of equal sizes: for `lax.scan`, or one by one."""

    # Arrays with a leading axis P: i32[P, R'], i32[P, R'], i32[P, S'].
    tree: TrajectoryTree
    rows: jax.Array  # i32[P, R'], row of the whole tree, R for padding
    is_first: jax.Array  # bool[P, R'], True if no earlier part has the row's token


@explains_arguments
def split(
    tree: TrajectoryTree, max_rows: int, *, num_segments: int | None = None
) -> TreeParts:
    """Partition a tree into parts of at most `max_rows` rows (host).

    Args:
      tree: concrete; R rows, S segments.
      max_rows: rows of each part, R', at least the tokens of the longest trajectory.
      num_segments: segments of each part, S'; None for the largest part's number.

    Returns:
      The parts. A token counts in the first part that has it: a loss uses the rows
      where `is_first`. Repeated rows are the cost of the bound.

    Raises:
      ValueError: for a traced or invalid tree, a trajectory longer than `max_rows`, or
        too few segments.

    Example:
      >>> import jkv
      >>> sequences = [[5, 6, 7], [8, 1, 2], [9, 4]]
      >>> tree = jkv.TrajectoryTree.of(sequences, parents=[-1, 0, 0])
      >>> parts = jkv.trees.split(tree, 6)
      >>> parts.rows.tolist()
      [[0, 1, 2, 6, 7, 8], [0, 1, 2, 3, 4, 5]]
      >>> parts.is_first.sum(axis=1).tolist()
      [5, 3]
    """
    if not is_known(tree):
        raise UsageError(
            "tree must be concrete, got a traced one; call split outside jit"
        )
    check_counts(max_rows=max_rows)
    check_tree(tree)
    measures = measure(tree)
    for segment in np.flatnonzero(measures.ends > max_rows):
        raise UsageError(
            f"max_rows must be >= {measures.ends.max()}, the longest trajectory, got "
            f"{max_rows}; segment {segment} ends at {measures.ends[segment]} tokens"
        )
    dealt = _deal(np.asarray(tree.parents), measures.lengths, max_rows)
    needed = max((len(part.segments) for part in dealt), default=0)
    if num_segments is not None and num_segments < needed:
        raise UsageError(f"num_segments must be >= {needed}, got {num_segments}")
    built = [_build(tree, part, max_rows, num_segments or needed) for part in dealt]
    return jax.tree.map(lambda *each: jnp.stack(each), *built)


class _Part(NamedTuple):
    """The segments of a part, in ascending order."""

    segments: list[int]
    new: set[int]  # segments in no earlier part


def _deal(
    parents: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], max_rows: int
) -> list[_Part]:
    """Assign segments to parts, each with its ancestors."""
    parts: list[_Part] = [_Part([], set())]
    held: set[int] = set()
    size = 0
    for segment in _walk(parents, lengths):
        missing = _find_missing(parents, segment, held)
        if size + lengths[missing].sum() > max_rows:
            parts.append(_Part([], set()))
            held, size = set(), 0
            missing = _find_missing(parents, segment, held)
        held.update(missing)
        size += int(lengths[missing].sum())
        parts[-1].segments.extend(missing)
        parts[-1].new.add(segment)
    return [_Part(sorted(part.segments), part.new) for part in parts if part.segments]


def _find_missing(
    parents: np.ndarray[Any, Any], segment: int, held: Iterable[int]
) -> list[int]:
    """Return a segment and its ancestors, without segments in `held`."""
    missing = []
    while segment >= 0 and segment not in held:
        missing.append(segment)
        segment = int(parents[segment])
    return missing


def _walk(
    parents: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]
) -> Iterable[int]:
    """Yield segments in depth-first order, smallest subtree first."""
    below = lengths.astype(np.int64)
    children: dict[int, list[int]] = {}
    for segment in reversed(range(len(parents))):
        children.setdefault(int(parents[segment]), []).append(segment)
        if parents[segment] >= 0:
            below[parents[segment]] += below[segment]
    waiting = [NO_PARENT]
    while waiting:
        segment = waiting.pop()
        if segment >= 0:
            yield segment
        found = children.get(segment, [])
        waiting.extend(sorted(found, key=lambda child: (-below[child], -child)))


def _build(
    tree: TrajectoryTree, part: _Part, max_rows: int, num_segments: int
) -> TreeParts:
    """Return one part, without the leading axis."""
    tokens, segments, parents = (
        np.asarray(each) for each in (tree.tokens, tree.segments, tree.parents)
    )
    number = np.full(len(parents) + 1, NO_PARENT, np.int32)
    number[part.segments] = np.arange(len(part.segments))
    rows = np.flatnonzero(np.isin(segments, part.segments))
    is_new = np.isin(segments[rows], list(part.new))
    behind = (0, max_rows - len(rows))
    subtree = TrajectoryTree(
        tokens=jnp.asarray(tokens[rows]),
        segments=jnp.asarray(number[segments[rows]]),
        parents=jnp.asarray(number[parents[part.segments]]),
        max_length=tree.max_length,
    )
    subtree = pad(subtree, num_rows=max_rows, num_segments=num_segments)
    padded = np.pad(rows.astype(np.int32), behind, constant_values=len(tokens))
    return TreeParts(subtree, jnp.asarray(padded), jnp.asarray(np.pad(is_new, behind)))

"""Trees of other sizes: padded, to share a compiled program, or cut into parts.

A part, for memory that does not hold a tree whole, is a tree of its own with a bounded
number of rows: some segments, and those that they continue, which are computed again.
Segments are dealt depth first, small branches before large ones, so that a part's
segments share much and the longest branch is repeated least. The parts' losses and
gradients add up to the tree's, as each token counts in one part.

Parts of trees under a bound of memory: "Tree Training" (arXiv 2511.00413,
https://arxiv.org/abs/2511.00413), which calls it tree partitioning.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import explains_arguments
from jkv.decoding.texts.text_tree import (
    NO_PARENT,
    TextTree,
    check_tree,
    is_known,
    measure,
)
from jkv.metadata.requests import check_counts
from jkv.status import UsageError


@explains_arguments
def pad(
    tree: TextTree,
    *,
    num_rows: int | None = None,
    num_segments: int | None = None,
    max_length: int | None = None,
) -> TextTree:
    """Return a tree with rows without tokens and empty roots behind its own.

    Args:
      tree: of any smaller sizes.
      num_rows: R of the result; static, None for the tree's own.
      num_segments: S of the result; static, None for the tree's own.
      max_length: most tokens of a text; static, None for the tree's own.

    Returns:
      The tree, with the same texts and the same numbers of segments and rows.

    Raises:
      ValueError: for a size below the tree's own.

    Example:
      >>> import jkv
      >>> tree = jkv.TextTree.of([[5, 6], [7]], parents=[-1, 0])
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
            raise UsageError(f"{name} must be at least {own}, the tree's own; {wanted}")
    rows, segments, length = (
        own if wanted is None else wanted for wanted, own in sizes.values()
    )
    xp: Any = np if is_known(tree) else jnp

    def fill(array: jax.Array, size: int) -> jax.Array:
        missing = (0, size - array.shape[0])
        return jnp.asarray(xp.pad(array, missing, constant_values=-1))

    return TextTree(
        tokens=fill(tree.tokens, rows),
        segments=fill(tree.segments, rows),
        parents=fill(tree.parents, segments),
        max_length=length,
    )


class TreeParts(NamedTuple):
    """P parts of a tree, all of the same sizes: to be scanned, or taken one by one."""

    tree: TextTree  # its arrays with P in front: i32[P, R'], i32[P, R'], i32[P, S']
    rows: jax.Array  # i32[P, R'], the row in the whole tree of each row, R for none
    is_first: jax.Array  # bool[P, R'], whether no earlier part has the row's token


@explains_arguments
def split(
    tree: TextTree, max_rows: int, *, num_segments: int | None = None
) -> TreeParts:
    """Cut a tree into parts of at most so many rows each (host).

    Args:
      tree: whose numbers are known; R rows, S segments.
      max_rows: rows of each part, R', at least the tokens of the longest text.
      num_segments: segments of each part, S'; None for as many as one needs.

    Returns:
      The parts. A token counts in the first part that has it: a loss takes the rows
      where `is_first`. What the parts repeat is what the bound costs.

    Raises:
      ValueError: for a tree that is not known or breaks an invariant, a text longer
        than `max_rows`, or fewer segments than a part needs.

    Example:
      >>> import jkv
      >>> texts = [[5, 6, 7], [8, 1, 2], [9, 4]]
      >>> tree = jkv.TextTree.of(texts, parents=[-1, 0, 0])
      >>> parts = jkv.trees.split(tree, 6)
      >>> parts.rows.tolist()
      [[0, 1, 2, 6, 7, 8], [0, 1, 2, 3, 4, 5]]
      >>> parts.is_first.sum(axis=1).tolist()
      [5, 3]
    """
    if not is_known(tree):
        raise UsageError("split looks at a tree's numbers: call it outside jit")
    check_counts(max_rows=max_rows)
    check_tree(tree)
    measures = measure(tree)
    for segment in np.flatnonzero(measures.ends > max_rows):
        raise UsageError(
            f"the text of segment {segment} has {measures.ends[segment]} tokens, and a "
            f"part {max_rows} rows; give max_rows of at least {measures.ends.max()}"
        )
    dealt = _deal(np.asarray(tree.parents), measures.lengths, max_rows)
    needed = max((len(part.segments) for part in dealt), default=0)
    if num_segments is not None and num_segments < needed:
        raise UsageError(
            f"a part needs {needed} segments, got num_segments={num_segments}"
        )
    built = [_build(tree, part, max_rows, num_segments or needed) for part in dealt]
    return jax.tree.map(lambda *each: jnp.stack(each), *built)


class _Part(NamedTuple):
    """The segments of a part, in ascending order."""

    segments: list[int]
    new: set[int]  # those that no earlier part has


def _deal(
    parents: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], max_rows: int
) -> list[_Part]:
    """Deal segments to parts, each with what it continues."""
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
    """Return a segment and its ancestors, without those that a part holds already."""
    missing = []
    while segment >= 0 and segment not in held:
        missing.append(segment)
        segment = int(parents[segment])
    return missing


def _walk(
    parents: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]
) -> Iterable[int]:
    """Yield segments before their children, those with fewest tokens below first."""
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


def _build(tree: TextTree, part: _Part, max_rows: int, num_segments: int) -> TreeParts:
    """Return one part, without the axis of parts."""
    tokens, segments, parents = (
        np.asarray(each) for each in (tree.tokens, tree.segments, tree.parents)
    )
    number = np.full(len(parents) + 1, NO_PARENT, np.int32)
    number[part.segments] = np.arange(len(part.segments))
    rows = np.flatnonzero(np.isin(segments, part.segments))
    is_new = np.isin(segments[rows], list(part.new))
    behind = (0, max_rows - len(rows))
    subtree = TextTree(
        tokens=jnp.asarray(tokens[rows]),
        segments=jnp.asarray(number[segments[rows]]),
        parents=jnp.asarray(number[parents[part.segments]]),
        max_length=tree.max_length,
    )
    subtree = pad(subtree, num_rows=max_rows, num_segments=num_segments)
    padded = np.pad(rows.astype(np.int32), behind, constant_values=len(tokens))
    return TreeParts(subtree, jnp.asarray(padded), jnp.asarray(np.pad(is_new, behind)))

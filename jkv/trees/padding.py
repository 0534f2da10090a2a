"""Trees of fixed sizes, so that trees of all steps share a compiled program."""

import dataclasses

import jax.numpy as jnp

from jkv.decoding.texts.text_tree import TextTree
from jkv.decoding.texts.tree_numbers import NO_PARENT
from jkv.status import UsageError


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
    behind = (0, rows - tree.num_rows)
    more_roots = (0, segments - tree.num_segments)
    return dataclasses.replace(
        tree,
        tokens=jnp.pad(tree.tokens, behind, constant_values=-1),
        segments=jnp.pad(tree.segments, behind, constant_values=-1),
        parents=jnp.pad(tree.parents, more_roots, constant_values=NO_PARENT),
        max_length=length,
    )

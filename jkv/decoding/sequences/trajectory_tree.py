"""Trajectory trees: segments of tokens that continue other segments.

A rollout leaves a tree: a prompt, its samples, tool results, branches. Stored as
separate sequences, prompts and turns would be repeated. Here each token has one row,
and a segment names its parent. Training on such trees instead of on each branch:
"Tree Training" (arXiv 2511.00413, https://arxiv.org/abs/2511.00413).

Symbols: R rows, S segments, N new segments of at most C tokens.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import expect, explains_arguments
from jkv.decoding.sequences.prompts import count_tokens
from jkv.metadata.requests import IntegerRows, Integers, as_prompts, broadcast
from jkv.operations import scatter_add
from jkv.status import UsageError

NO_PARENT = -1

Numbers = np.ndarray[Any, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryTree:
    """A trajectory tree: R tokens in S segments with shared prefixes.

    The sequence of a segment is its parent's sequence followed by its own tokens.
    Invariants:

    1. Parents precede their children: `parents[s] < s`, and -1 for a root.
    2. The rows of a segment are contiguous, in the order of its tokens. A segment may
    be
       empty.
    3. A row without a token has -1 in `tokens` and in `segments`.
    4. No sequence is longer than `max_length`.

    `jkv.score` takes such a tree. A row without a token is computed like any other.

    Example:
      >>> import jkv
      >>> tree = jkv.TrajectoryTree.of([[5, 6, 7], [8], [9, 4]], parents=[-1, 0, 0])
      >>> tree.tokens.tolist(), tree.segments.tolist(), tree.max_length
      ([5, 6, 7, 8, 9, 4], [0, 0, 0, 1, 2, 2], 5)
    """

    tokens: jax.Array  # i32[R], token ids, -1 for none
    segments: jax.Array  # i32[R], the segment of each row, -1 for none
    parents: jax.Array  # i32[S], the parent of each segment, -1 for none
    # Upper bound of the tokens of a sequence. Static: the width of block tables.
    max_length: int = dataclasses.field(metadata={"static": True})

    @classmethod
    @explains_arguments
    def of(
        cls, sequences: IntegerRows, parents: Integers = NO_PARENT
    ) -> "TrajectoryTree":
        """Return a tree of segments, parents before their children.

        Outside jit it has a row for each token. Inside jit, where lengths are unknown,
        it has a row for each entry of `sequences`.

        Args:
          sequences: i32[S, C], -1 past the end of each segment, or a list of token ids
            of each.
          parents: i32[S], the parent of each segment, -1 for none; an int holds for
            all.

        Raises:
          ValueError: for arguments of a wrong shape or type; outside jit, for a parent
            that does not precede its child.
        """
        given = as_prompts(sequences, "sequences")
        (known,) = broadcast(given.shape[0], parents=parents)
        return _continue(empty_tree(), given, known)

    @property
    def num_rows(self) -> int:
        """The number of rows, R."""
        return self.tokens.shape[0]

    @property
    def num_segments(self) -> int:
        """The number of segments, S."""
        return self.parents.shape[0]

    @property
    def lengths(self) -> jax.Array:
        """The tokens of each segment without its parents', i32[S]."""
        ones = (self.segments >= 0).astype(jnp.int32)
        segments = jnp.where(self.segments >= 0, self.segments, self.num_segments)
        empty = jnp.zeros((self.num_segments,), jnp.int32)
        return scatter_add(empty, segments, ones)


def empty_tree() -> TrajectoryTree:
    nothing = jnp.zeros((0,), jnp.int32)
    return TrajectoryTree(
        tokens=nothing, segments=nothing, parents=nothing, max_length=0
    )


class TreeRows(NamedTuple):
    """Rows of new segments."""

    tokens: jax.Array  # i32[n], -1 for none
    owners: jax.Array  # i32[n], index of the new segment, -1 for none
    places: jax.Array  # i32[n], index of the token in i32[N * C]


def list_rows(sequences: jax.Array) -> TreeRows:
    """Return a row for each token of i32[N, C]; in jit for each entry."""
    if is_known(sequences):
        # In numpy: each number of tokens would compile a program.
        known = np.asarray(sequences)
        is_token = np.logical_and.accumulate(known >= 0, axis=1).reshape(-1)
        kept = np.flatnonzero(is_token)
        found: Any = known.reshape(-1)[kept], kept // max(sequences.shape[1], 1), kept
        return TreeRows(*(each.astype(np.int32) for each in found))
    return list_places(sequences)


def list_places(sequences: jax.Array) -> TreeRows:
    """Return a row for each entry of i32[N, C], token or padding."""
    count, width = sequences.shape
    column = jnp.arange(width, dtype=jnp.int32)[None]
    is_there = (column < count_tokens(sequences)[:, None]).reshape(-1)
    place = jnp.arange(count * width, dtype=jnp.int32)
    tokens = jnp.where(is_there, sequences.reshape(-1), -1)
    owners = jnp.where(is_there, jax.lax.div(place, jnp.int32(max(width, 1))), -1)
    return TreeRows(tokens, owners, place)


def join_arrays(one: jax.Array, other: jax.Array) -> jax.Array:
    """Concatenate two arrays; concrete ones in numpy, without compiling."""
    if is_known((one, other)):
        return jnp.asarray(np.concatenate([np.asarray(one), np.asarray(other)]))
    return jnp.concatenate([one, other])


@explains_arguments
def grow(
    tree: TrajectoryTree, sequences: IntegerRows, parents: Integers
) -> tuple[TrajectoryTree, jax.Array]:
    """Add segments to a tree.

    Outside jit a row is added for each token, inside jit for each entry of `sequences`.

    Args:
      tree: S segments.
      sequences: i32[N, C], -1 past the end of each segment, or a list of token ids of
        each.
      parents: i32[N], the parent of each new segment in the tree, -1 for none; an int
        holds for all.

    Returns:
      The tree, and i32[N], the numbers of the new segments: S, S + 1, ...

    Raises:
      ValueError: for arguments of a wrong shape or type; outside jit, for a parent that
        is not in the tree.

    Example:
      >>> import jkv
      >>> tree = jkv.TrajectoryTree.of([[5, 6, 7]])
      >>> tree, samples = jkv.trees.grow(tree, [[8], [9, 4]], 0)
      >>> tree, tools = jkv.trees.grow(tree, [[1, 2]], samples[1:])
      >>> tree.parents.tolist(), tree.tokens.tolist()
      ([-1, 0, 0, 2], [5, 6, 7, 8, 9, 4, 1, 2])
    """
    given = as_prompts(sequences, "sequences")
    (known,) = broadcast(given.shape[0], parents=parents)
    first = tree.num_segments
    if is_known(known):
        for row in np.flatnonzero(np.asarray(known) >= first):
            raise UsageError(
                f"parents[{row}] must be a segment of the tree, "
                f"0 to {first - 1}, or -1 for none, got {known[row]}"
            )
    numbers = np.arange(first, first + given.shape[0], dtype=np.int32)
    return _continue(tree, given, known), jnp.asarray(numbers)


def _continue(
    tree: TrajectoryTree, sequences: jax.Array, parents: jax.Array
) -> TrajectoryTree:
    """Add new segments with parents, i32[N], numbered in the new tree."""
    rows = list_rows(sequences)
    xp: Any = np if is_known(rows.owners) else jnp
    segments = xp.where(rows.owners >= 0, rows.owners + tree.num_segments, -1)
    grown = TrajectoryTree(
        tokens=join_arrays(tree.tokens, rows.tokens),
        segments=join_arrays(tree.segments, segments),
        parents=join_arrays(tree.parents, jnp.asarray(parents)),
        max_length=_bound_length(tree, parents, sequences.shape[1]),
    )
    if not is_known(grown):
        return grown
    longest = int(measure(grown).ends.max(initial=0))
    grown = dataclasses.replace(grown, max_length=max(longest, tree.max_length))
    check_tree(grown)
    return grown


def _bound_length(tree: TrajectoryTree, parents: jax.Array, width: int) -> int:
    """Return an upper bound of lengths with C new tokens after parents, i32[N]."""
    first = tree.num_segments
    if not is_known(parents):
        return tree.max_length + width * (1 if first else parents.shape[0])
    lengths: list[int] = []
    for parent in np.asarray(parents):
        is_new = first <= parent < first + len(lengths)
        before = lengths[parent - first] if is_new else tree.max_length
        lengths.append(width + (before if parent >= 0 else 0))
    return max([tree.max_length, *lengths])


def is_known(arrays: Any) -> bool:
    """Return True if a pytree is concrete: outside jit, or constants inside it."""
    return not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays))


class Measures(NamedTuple):
    """Positions of the segments of a concrete tree."""

    first_rows: Numbers  # i32[S], R for an empty segment
    lengths: Numbers  # i32[S]
    ends: Numbers  # i32[S], tokens of each segment's sequence


def measure(tree: TrajectoryTree) -> Measures:
    segments, parents = np.asarray(tree.segments), np.asarray(tree.parents)
    rows = np.flatnonzero(segments >= 0)
    first_rows = np.full(parents.shape, len(segments), np.int32)
    np.minimum.at(first_rows, segments[rows], rows.astype(np.int32))
    lengths = np.bincount(segments[rows], minlength=len(parents)).astype(np.int32)
    ends = lengths.copy()
    for segment, parent in enumerate(parents):
        if 0 <= parent < segment:
            ends[segment] += ends[parent]
    return Measures(first_rows, lengths, ends)


@explains_arguments
def read_sequence(tree: TrajectoryTree, segment: int) -> list[int]:
    """Return the sequence of a segment, its parents' tokens and its own (host).

    Args:
      tree: a concrete tree.
      segment: its number.

    Returns:
      Token ids, in order.

    Raises:
      ValueError: for a number without a segment.

    Example:
      >>> import jkv
      >>> tree = jkv.TrajectoryTree.of([[5, 6, 7], [8], [9, 4]], parents=[-1, 0, 0])
      >>> jkv.trees.read_sequence(tree, 2)
      [5, 6, 7, 9, 4]
    """
    if not 0 <= segment < tree.num_segments:
        raise UsageError(
            f"segment must be in 0..{tree.num_segments - 1}, got {segment}"
        )
    tokens, segments, parents = (
        np.asarray(each) for each in (tree.tokens, tree.segments, tree.parents)
    )
    parts = []
    while segment >= 0:
        parts.append(tokens[segments == segment].tolist())
        segment = int(parents[segment])
    return [token for part in reversed(parts) for token in part]


def check_tree(tree: TrajectoryTree) -> None:
    """Check shapes and dtypes of a tree, and its numbers if they are concrete."""
    sizes: dict[str, int] = {}
    for name in ("tokens", "segments", "parents"):
        array = getattr(tree, name)
        letter = "S" if name == "parents" else "R"
        sizes = expect(f"a tree's {name}", array, letter, sizes, np.dtype(np.int32))
    if is_known(tree):
        _check_numbers(tree)


def _check_numbers(tree: TrajectoryTree) -> None:
    """Raise UsageError for the first number that breaks an invariant."""
    tokens, segments, parents = (
        np.asarray(each) for each in (tree.tokens, tree.segments, tree.parents)
    )
    numbers = np.arange(len(parents))
    for segment in np.flatnonzero((parents >= numbers) | (parents < NO_PARENT)):
        raise UsageError(
            f"segment {segment} has parent {parents[segment]}; a parent must precede "
            f"its children, or be -1 for none"
        )
    is_wrong = (segments >= len(parents)) | (segments < -1)
    is_wrong |= (segments < 0) != (tokens < 0)
    for row in np.flatnonzero(is_wrong):
        raise UsageError(
            f"row {row} has token {tokens[row]} and segment {segments[row]} of "
            f"{len(parents)}; a row without a token needs -1 in both"
        )
    # Each segment starts once.
    begins = segments[np.flatnonzero(np.diff(segments, prepend=-1) != 0)]
    num_begins = np.bincount(begins[begins >= 0], minlength=1)
    for segment in np.flatnonzero(num_begins > 1):
        raise UsageError(f"the rows of segment {segment} must be contiguous")
    ends = measure(tree).ends
    for segment in np.flatnonzero(ends > tree.max_length):
        raise UsageError(
            f"the sequence of segment {segment} has {ends[segment]} tokens; "
            f"max_length must be at least that, got {tree.max_length}"
        )

"""Record the trajectory tree of a rollout.

`generate`, `extend` and `fork` determine which sequence continues which; recording them
as they happen avoids a search for shared prefixes in token lists. All functions work
inside jit, where the arrays grow by the static maximum of a call; outside jit they grow
by the actual tokens.

Symbols: R rows and S segments of the tree, B sequences of a call, M of the cache.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import expect, explains_arguments
from jkv.decoding.sequences.prompts import count_tokens
from jkv.decoding.sequences.results import FinishReason, Generation
from jkv.decoding.sequences.trajectory_tree import (
    NO_PARENT,
    TrajectoryTree,
    empty_tree,
    grow,
    is_known,
    join_arrays,
    list_rows,
    read_sequence,
)
from jkv.metadata.requests import IntegerRows, Integers, as_prompts, broadcast
from jkv.status import UsageError
from jkv.verbs.allocation import Allocation
from jkv.verbs.branching import Fork


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TreeRecord:
    """The trajectory tree of a rollout, and each cached sequence's position in it.

    Example:
      >>> import jkv
      >>> record = jkv.trees.TreeRecord.empty(max_sequences=4)
      >>> record.tree.num_segments, record.tips.tolist()
      (0, [-1, -1, -1, -1])
    """

    tree: TrajectoryTree  # the recorded tree, R rows and S segments
    # f32[R], log-probabilities reported by the rollout; 0 for prompt tokens
    logprobs: jax.Array
    is_generated: jax.Array  # bool[S], True for segments that the model generated
    tips: jax.Array  # i32[M], the last segment of each sequence, or -1
    # i32[M], number of last tokens that are not in the cache yet
    num_unfed: jax.Array

    @classmethod
    def empty(cls, max_sequences: int) -> "TreeRecord":
        """Return an empty record.

        Args:
          max_sequences: of the cache, M; 0 if only `generate` is called.
        """
        return cls(
            tree=empty_tree(),
            logprobs=jnp.zeros((0,), jnp.float32),
            is_generated=jnp.zeros((0,), bool),
            tips=jnp.full((max_sequences,), NO_PARENT, jnp.int32),
            num_unfed=jnp.zeros((max_sequences,), jnp.int32),
        )


@explains_arguments
def note_generate(
    record: TreeRecord,
    prompts: IntegerRows,
    result: Generation,
    parents: Integers = NO_PARENT,
) -> tuple[TreeRecord, jax.Array]:
    """Record `generate`: one segment per prompt, and its samples.

    Args:
      record: of earlier calls.
      prompts: i32[Q, P], as passed to `generate`; for prompts that continue segments,
        only the tokens after the parent.
      result: of N sequences, N / Q samples of each prompt.
      parents: i32[Q], the segment that each prompt continues, -1 for none. An int
        applies to all.

    Returns:
      The record, and i32[N], the segments of the samples.

    Raises:
      ValueError: for prompts of a wrong shape or type, or a result of other prompts.

    Example:
      >>> import jax, jkv
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> cache, result = jkv.generate(count_on, None, cache, [[5, 6, 7]],
      ...     max_new_tokens=2, num_samples=2)
      >>> record = jkv.trees.TreeRecord.empty(0)
      >>> record, samples = jkv.trees.note_generate(record, [[5, 6, 7]], result)
      >>> record.tree.tokens.tolist(), record.tree.parents.tolist(), samples.tolist()
      ([5, 6, 7, 8, 9, 8, 9], [-1, 0, 0], [1, 2])
    """
    sequences = as_prompts(prompts, "prompts")
    num_prompts, num_sequences = sequences.shape[0], result.tokens.shape[0]
    if not num_prompts or num_sequences % num_prompts:
        raise UsageError(
            f"result must have a multiple of {num_prompts} prompts as sequences, got "
            f"{num_sequences}; pass the prompts of this call"
        )
    record, segments = _add(record, sequences, parents)
    each = num_sequences // num_prompts
    return _add(record, result.tokens, jnp.repeat(segments, each), result.logprobs)


@explains_arguments
def note_allocate(record: TreeRecord, opened: Allocation) -> TreeRecord:
    """Record newly opened sequences, without tokens.

    Args:
      record: of earlier calls.
      opened: result of `allocate`.

    Returns:
      The record.

    Raises:
      ValueError: if `opened` is not an `Allocation`.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> cache, opened = jkv.allocate(cache, [0])
      >>> record = jkv.trees.TreeRecord.empty(cache.max_sequences)
      >>> jkv.trees.note_allocate(record, opened).tips.tolist()
      [-1, -1, -1, -1]
    """
    if not isinstance(opened, Allocation):
        raise UsageError(
            f"opened must be a jkv.Allocation, got {type(opened).__name__}"
        )
    return _move(record, opened.seq_ids, jnp.int32(NO_PARENT), jnp.int32(0))


@explains_arguments
def note_given(
    record: TreeRecord, seq_ids: Integers, tokens: IntegerRows
) -> tuple[TreeRecord, jax.Array]:
    """Record tokens that a sequence receives, before they are computed.

    For a tool result shared by several branches, record it on the trunk, fork the
    trunk, and pass the tokens to `extend` for each branch, after the pending token. Or
    compute all but the last of them on the trunk first, see `note_fed`.

    Args:
      record: of earlier calls.
      seq_ids: i32[B], open sequences; -1 is padding.
      tokens: i32[B, P], -1 after the end, or a list of token ids for each.

    Returns:
      The record, and i32[B], the segments of these tokens.

    Raises:
      ValueError: for arguments of a wrong shape or type.

    Example:
      >>> import jkv
      >>> record = jkv.trees.TreeRecord.empty(max_sequences=2)
      >>> record, _ = jkv.trees.note_given(record, [0], [[5, 6, 7]])
      >>> record.tips.tolist(), record.num_unfed.tolist()
      ([0, -1], [3, 0])
    """
    (ids,) = broadcast(seq_ids=seq_ids)
    sequences = as_prompts(tokens, "tokens")
    expect("tokens", sequences, "B ...", {"B": len(ids)}, why="a row for each sequence")
    tips, unfed = _find(record, ids)
    record, segments = _add(record, sequences, tips)
    return _move(record, ids, segments, unfed + count_tokens(sequences)), segments


@explains_arguments
def note_fed(record: TreeRecord, seq_ids: Integers, num_tokens: Integers) -> TreeRecord:
    """Record that tokens of the tree are now in the cache.

    Branches share the computation of their common tokens if an `extend`, with its
    result discarded, adds all but the last of them to the trunk before the fork. Record
    that call here, not by `note_extend`.

    Args:
      record: of earlier calls.
      seq_ids: i32[B], open sequences; -1 is padding.
      num_tokens: i32[B] or int, number of tokens added to the cache.

    Returns:
      The record.

    Raises:
      ValueError: for arguments of a wrong shape or type.

    Example:
      >>> import jkv
      >>> record = jkv.trees.TreeRecord.empty(max_sequences=2)
      >>> record, _ = jkv.trees.note_given(record, [0], [[5, 6, 7]])
      >>> jkv.trees.note_fed(record, [0], 2).num_unfed.tolist()
      [1, 0]
    """
    ids, counts = broadcast(seq_ids=seq_ids, num_tokens=num_tokens)
    tips, waiting = _find(record, ids)
    return _move(record, ids, tips, jnp.maximum(waiting - counts, 0))


@explains_arguments
def note_extend(
    record: TreeRecord, seq_ids: Integers, tokens: IntegerRows, result: Generation
) -> tuple[TreeRecord, jax.Array]:
    """Record `extend`: the tokens passed to it, and the generated ones.

    The passed tokens begin with those that the record has and the cache lacks: the last
    generated token, and tokens of `note_given`. These are not recorded twice. A refused
    sequence is unchanged.

    Args:
      record: of earlier calls.
      seq_ids: i32[B], as passed to `extend`.
      tokens: i32[B, P], as passed to `extend`.
      result: returned by `extend`.

    Returns:
      The record, and i32[B], the segments of the generated tokens.

    Raises:
      ValueError: for arguments of a wrong shape or type; outside jit for tokens that do
        not begin with the ones that the cache lacks.

    Example:
      >>> import jax, jkv
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> record = jkv.trees.TreeRecord.empty(cache.max_sequences)
      >>> cache, opened = jkv.allocate(cache, [0])
      >>> for given in ([[5, 6, 7]], [[9, 40]]):
      ...     cache, answer = jkv.extend(count_on, None, cache, opened.seq_ids, given,
      ...         max_new_tokens=2)
      ...     record, _ = jkv.trees.note_extend(record, opened.seq_ids, given, answer)
      >>> jkv.trees.read_sequence(record.tree, int(record.tips[0]))
      [5, 6, 7, 8, 9, 40, 41, 42]
    """
    (ids,) = broadcast(seq_ids=seq_ids)
    sequences = as_prompts(tokens, "tokens")
    expect("tokens", sequences, "B ...", {"B": len(ids)}, why="a row for each sequence")
    sizes, why = {"B": len(ids)}, "a row for each sequence"
    expect("result.tokens", result.tokens, "B ...", sizes, why=why)
    reasons = [FinishReason.NAN_LOGITS, FinishReason.NOTHING_ALLOWED]
    was_fed = (result.lengths > 0) | jnp.isin(
        result.reasons, jnp.array(reasons, jnp.int32)
    )
    tips, unfed = _find(record, ids)
    _check_unfed(record, sequences, tips, jnp.where(was_fed, unfed, 0))
    column = unfed[:, None] + jnp.arange(sequences.shape[1], dtype=jnp.int32)[None]
    new = jnp.take_along_axis(sequences, column, axis=1, mode="fill", fill_value=-1)
    new = jnp.where(was_fed[:, None], new, -1)
    record, given = _add(record, new, tips)
    record, segments = _add(record, result.tokens, given, result.logprobs)
    waiting = (result.lengths > 0).astype(jnp.int32)
    moved = jnp.where(was_fed, ids, NO_PARENT)
    return _move(record, moved, segments, waiting), segments


@explains_arguments
def note_fork(record: TreeRecord, parents: Integers, forked: Fork) -> TreeRecord:
    """Record forks of whole sequences: children start at their parents' positions.

    Args:
      record: of earlier calls.
      parents: i32[B], as passed to `fork`, without lengths.
      forked: result of `fork`.

    Returns:
      The record.

    Raises:
      ValueError: for arguments of a wrong shape or type.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> cache, opened = jkv.allocate(cache, [0])
      >>> record = jkv.trees.TreeRecord.empty(cache.max_sequences)
      >>> record, _ = jkv.trees.note_given(record, opened.seq_ids, [[5, 6, 7]])
      >>> cache, forked = jkv.fork(cache, [0, 0])
      >>> jkv.trees.note_fork(record, [0, 0], forked).tips.tolist()
      [0, 0, 0, -1]
    """
    (ids,) = broadcast(seq_ids=parents)
    if not isinstance(forked, Fork) or forked.seq_ids.shape != ids.shape:
        raise UsageError(f"forked must be the jkv.Fork of {ids.shape[0]} parents")
    return _move(record, forked.seq_ids, *_find(record, ids))


def _add(
    record: TreeRecord,
    sequences: jax.Array,
    parents: Integers,
    logprobs: jax.Array | None = None,
) -> tuple[TreeRecord, jax.Array]:
    """Append segments, i32[N, C]; generated ones have log-probabilities, f32[N, C]."""
    rows = list_rows(sequences)
    tree, segments = grow(record.tree, sequences, parents)
    is_generated = np.full(segments.shape, logprobs is not None)
    if logprobs is None:
        added: Any = np.zeros(rows.places.shape, np.float32)
    else:
        xp: Any = np if is_known((logprobs, rows.places)) else jnp
        values = xp.asarray(logprobs).reshape(-1)[rows.places]
        added = xp.where(rows.owners >= 0, values, xp.float32(0))
    record = dataclasses.replace(
        record,
        tree=tree,
        logprobs=join_arrays(record.logprobs, added),
        is_generated=join_arrays(record.is_generated, jnp.asarray(is_generated)),
    )
    return record, segments


def _find(record: TreeRecord, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the last segment and the uncached token count of sequences, i32[B]."""
    ids = jnp.where(ids < 0, record.tips.shape[0], ids)
    tips = record.tips.at[ids].get(mode="fill", fill_value=NO_PARENT)
    return tips, record.num_unfed.at[ids].get(mode="fill", fill_value=0)


def _move(
    record: TreeRecord, ids: jax.Array, tips: jax.Array, num_unfed: jax.Array
) -> TreeRecord:
    """Set the positions of sequences, i32[B]; -1 is padding."""
    ids = jnp.where(ids < 0, record.tips.shape[0], ids)
    return dataclasses.replace(
        record,
        tips=record.tips.at[ids].set(tips, mode="drop"),
        num_unfed=record.num_unfed.at[ids].set(num_unfed, mode="drop"),
    )


def _check_unfed(
    record: TreeRecord, sequences: jax.Array, tips: jax.Array, num_unfed: jax.Array
) -> None:
    """Raise for tokens without the ones that the cache lacks, outside jit."""
    arrays = sequences, tips, num_unfed
    if not is_known((arrays, record.tree)):
        return
    for sequence, tip, count in zip(*map(np.asarray, arrays), strict=True):
        if count:
            known = read_sequence(record.tree, int(tip))[-count:]
            if sequence[:count].tolist() != known:
                raise UsageError(
                    f"tokens must begin with {known}, which the cache lacks, got "
                    f"{sequence[sequence >= 0].tolist()}"
                )

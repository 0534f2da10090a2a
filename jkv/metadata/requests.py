"""Arguments, admission and counters, shared by all verbs.

A verb computes a `Status` for each request from the state before the call, then
applies the served requests, counts all by status, and advances the clock.

JAX has no 64-bit integers by default, so a counter is two 32-bit words. The clock is a
counter: each call that serves a request increments it, and its low word stamps the
opening and the last use of a sequence. Each ring counts the ids that leave it.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import I32, check_fixed, namespace_of, saturated
from jkv.metadata.part import Demand, Granted
from jkv.operations import (
    MOST_COMPARED,
    is_first,
    running_sum,
    scatter,
    scatter_add,
    stage,
)
from jkv.signatures import Integer as Integer
from jkv.signatures import IntegerArray as IntegerArray
from jkv.signatures import IntegerRows as IntegerRows
from jkv.signatures import Integers as Integers
from jkv.state import NO_SEQUENCE, Metadata, SequenceRow
from jkv.status import NUM_COUNTERS, Counter, Status, UsageError

# Block counts, one for all groups or one each.
Blocks: TypeAlias = jax.Array | int | tuple[jax.Array | int, ...]


def broadcast(
    num_requests: int | None = None, /, **arguments: Integers
) -> list[jax.Array]:
    """Return the arguments as i32[B] arrays, scalars repeated for every request.

    B is `num_requests` if given, else the length of the arrays among the arguments.
    Integers outside 32 bits saturate, which keeps "too large" and "negative". Other
    dtypes and unequal lengths are refused.
    """
    arrays = {name: saturated(name, value) for name, value in arguments.items()}
    sizes = {name: a.shape[0] for name, a in arrays.items() if a.ndim == 1}
    if num_requests is not None:
        sizes["prompts"] = num_requests
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"arguments must have one entry per request, got lengths {sizes}; pass "
            f"arrays of equal length, or an int for all requests"
        )
    shape = (next(iter(sizes.values()), 1),)
    return [a if a.ndim else namespace_of(a).full(shape, a) for a in arrays.values()]


def as_salts(name: str, salts: Integers) -> Integers:
    """Return cache salts for `broadcast`, unsigned ones as signed with the same bits.

    Saturation would merge two salts: numbers that do not fit are refused.
    """
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(salts)):
        if isinstance(salts, jax.Array) and salts.dtype == jnp.uint32:
            return jax.lax.bitcast_convert_type(salts, jnp.int32)
        return salts
    numbers = np.asarray(salts)
    if numbers.dtype == np.int32 or not np.issubdtype(numbers.dtype, np.integer):
        return salts
    lowest, highest = numbers.min(initial=0), numbers.max(initial=0)
    if lowest < I32.min or highest >= 2**32:
        raise ValueError(
            f"{name} must fit in 32 bits, got numbers from {lowest} to {highest}; hash "
            f"longer names to 32 bits"
        )
    return numbers.astype(np.int64).astype(np.uint32).view(np.int32)


def as_prompts(prompts: IntegerRows, name: str = "tokens") -> jax.Array:
    """Return prompts, an array or lists, as i32[B, P], padded with -1."""
    return jnp.asarray(read_prompts(prompts, name))


def read_prompts(prompts: IntegerRows, name: str) -> np.ndarray[Any, Any] | jax.Array:
    """Return the same in numpy, unless the prompts are or contain JAX arrays."""
    expected = (
        f"{name} must be i32[B, P], one prompt a row and -1 after its end, or a list "
        f"of lists of token ids (of one prompt, [[5, 6, 7]])"
    )
    if not isinstance(prompts, jax.Array | np.ndarray):
        prompts = pad_rows(prompts, expected)
    check_fixed(name, prompts)
    if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
        raise UsageError(f"{expected}, got {prompts.dtype}{list(prompts.shape)}")
    return as_ids(name, prompts)


def pad_rows(prompts: Any, expected: str) -> np.ndarray[Any, Any] | jax.Array:
    """Return lists of token ids as an array, its rows padded with -1."""
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(prompts))
    xp: Any = jnp if is_traced else np
    try:
        rows = [xp.asarray(row) for row in prompts]
    except (TypeError, ValueError):
        raise UsageError(f"{expected}, got {type(prompts).__name__}") from None
    # An empty list has no integer dtype: use the others'.
    dtype = next((row.dtype for row in rows if row.size), np.dtype(np.int32))
    rows = [row if row.size else xp.zeros(row.shape, dtype) for row in rows]
    if any(row.ndim != 1 for row in rows):
        raise UsageError(f"{expected}, got rows of {rows[0].dtype}{[*rows[0].shape]}")
    longest = max((len(row) for row in rows), default=1)
    padded = [
        xp.pad(row, (0, max(longest, 1) - len(row)), constant_values=-1) for row in rows
    ]
    return xp.stack(padded) if rows else np.zeros((0, 1), np.int32)


def check_counts(**counts: int) -> None:
    """Refuse static counts that are not positive ints, by name."""
    for name, count in counts.items():
        check_static(name, count, 1)


def check_static(name: str, number: int, least: int) -> None:
    """Refuse a static number that is not an int or is too small."""
    if isinstance(number, np.integer):
        raise UsageError(
            f"{name} must be a static int, got {number!r}; pass int({name})"
        )
    if not isinstance(number, int) or not least <= number <= I32.max:
        raise UsageError(
            f"{name} must be a static int of at least {least} and below 2^31, got "
            f"{number!r}"
        )


def as_ids(name: str, ids: Any) -> Any:
    """Return token ids as i32, in numpy if given so; refuse ids that would wrap."""
    if isinstance(ids, np.ndarray) and ids.size:
        for extreme in (ids.max(), ids.min()):
            if not I32.min <= extreme <= I32.max:
                raise ValueError(f"{name} must fit in 32 bits, got {extreme}")
    return ids.astype(np.int32)


def as_slots(slots: Any) -> jax.Array:
    """Return slots of tokens as i32[..., C]; ints outside 32 bits saturate."""
    array: Any = slots if isinstance(slots, jax.Array | np.ndarray) else None
    if array is None:
        is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(slots))
        try:
            array = jnp.asarray(slots) if is_traced else np.asarray(slots)
        except ValueError:
            raise UsageError(
                "kept must be an array of slots, got rows of different lengths; pad "
                "them, entries from num_kept on are ignored"
            ) from None
    xp = namespace_of(array)
    if array.size == 0 and not isinstance(slots, jax.Array | np.ndarray):
        array = array.astype(np.int32)
    if array.ndim == 0 or not xp.issubdtype(array.dtype, np.integer):
        raise UsageError(
            f"kept must be integer slots, i32[B, C] or i32[B, L, K, C], got "
            f"{array.dtype}{list(array.shape)}"
        )
    check_fixed("kept", array)
    if array.dtype != np.int32 and np.iinfo(array.dtype).max > I32.max:
        low = max(I32.min, np.iinfo(array.dtype).min)
        array = xp.clip(array, *(array.dtype.type(each) for each in (low, I32.max)))
    return jnp.asarray(array, jnp.int32)


def is_live(metadata: Metadata, seq_ids: jax.Array) -> jax.Array:
    """Return True where an id names an open sequence, bool[B]."""
    return is_open(metadata, seq_ids, metadata.sequences.read(seq_ids))


def is_open(metadata: Metadata, seq_ids: jax.Array, rows: SequenceRow) -> jax.Array:
    """Return True where an id names an open sequence, bool[B], given their rows."""
    known = (seq_ids >= 0) & (seq_ids < metadata.max_sequences)
    return known & (jnp.asarray(rows.is_open) != 0)


def is_first_mention(metadata: Metadata, seq_ids: jax.Array) -> jax.Array:
    """Return True where no earlier request names the same id, bool[B]."""
    if seq_ids.shape[0] <= 1:
        return jnp.ones(seq_ids.shape, bool)
    return _is_first_mention(jnp.asarray(seq_ids), num_ids=metadata.max_sequences)


@stage
def _is_first_mention(seq_ids: jax.Array, *, num_ids: int) -> jax.Array:
    # Negative ids would wrap around to the last rows: none reaches the scatter.
    return is_first(jnp.where(seq_ids < 0, num_ids, seq_ids), num_ids)


def is_live_once(metadata: Metadata, seq_ids: jax.Array) -> jax.Array:
    """Return True at the first mention of an open sequence, bool[B]."""
    return is_live(metadata, seq_ids) & is_first_mention(metadata, seq_ids)


def find_status(
    is_padding: jax.Array, causes: list[tuple[Status, jax.Array]]
) -> jax.Array:
    """Return each request's first applicable cause, or OK, i32[B]."""
    status = jnp.full(is_padding.shape, Status.OK, jnp.int32)
    for cause, applies in reversed(causes):
        status = jnp.where(applies, jnp.int32(cause), status)
    return jnp.where(is_padding, jnp.int32(Status.OK), status)


def saturating_cumsum(counts: jax.Array, limit: int) -> jax.Array:
    """Return running sums capped at `limit`, i32[B], for counts in 0..limit."""
    if counts.shape[0] * limit <= I32.max:
        return jnp.minimum(running_sum(counts), limit)
    return jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, limit), counts)


class Agreed(NamedTuple):
    """The requests that the pools can serve."""

    no_block: jax.Array  # bool[B], requests refused for lack of free blocks
    granted: tuple[tuple[Granted, ...], ...]  # by part, then by pool


def agree(lacks: Sequence[tuple[Demand, ...]], keep_free: Blocks = 0) -> Agreed:
    """Decide in request order which requests the free blocks of all pools cover.

    From the first request that some pool cannot serve, all requests that need blocks
    are refused; requests without need are served. `keep_free` blocks, i32[] for all
    pools or each, are left.
    """
    pools = [lack for of_part in lacks for lack in of_part]
    if not pools:  # without pools no request lacks a block
        return Agreed(jnp.zeros((1,), bool), tuple(() for _ in lacks))
    kept = keep_free if isinstance(keep_free, tuple) else (keep_free,) * len(pools)
    is_over, granted = [], []
    for lack, keep in zip(pools, kept, strict=True):
        limit = lack.most + 1
        taken = saturating_cumsum(jnp.minimum(lack.num, limit), limit)
        is_over.append(taken > lack.free - keep)
        granted.append(Granted(lack.num, taken - lack.num))
    wants, of_pools = [lack.wants for lack in pools], iter(granted)
    of_parts = tuple(tuple(next(of_pools) for _ in of_part) for of_part in lacks)
    return Agreed(any_of(wants) & any_of(is_over), of_parts)


def any_of(masks: Sequence[jax.Array | np.ndarray]) -> jax.Array:
    """Return the elementwise OR of masks; False without masks."""
    return functools.reduce(operator.or_, masks or [np.bool_(False)])  # type: ignore[return-value,list-item]


def is_padding(seq_ids: jax.Array) -> jax.Array:
    """Return True where a request is padding, bool[B]."""
    return seq_ids == NO_SEQUENCE


def add_counts(metadata: Metadata, increments: dict[Counter, jax.Array]) -> Metadata:
    """Add to some counters, each increment i32[] or u32[], at least 0."""
    kind = jnp.arange(NUM_COUNTERS, dtype=jnp.int32)
    rows = jnp.zeros((NUM_COUNTERS,), jnp.uint32)
    for counter, increment in increments.items():
        rows = jnp.where(kind == counter, increment.astype(jnp.uint32), rows)
    counts = _add_all(metadata.sequences.counters, rows)
    return metadata.with_sequences(counters=counts)


def settle(metadata: Metadata, status: jax.Array, served: jax.Array) -> Metadata:
    """Count requests by status, i32[B], and tick if any was served, bool[B]."""
    counts = _settle(metadata.sequences.counters, status, served)
    return metadata.with_sequences(counters=counts)


@stage
def _settle(old: jax.Array, status: jax.Array, served: jax.Array) -> jax.Array:
    """Count each refused request in the row of its status, and a tick."""
    row = jnp.where(served, np.int32(Counter.CLOCK), status)
    counts = jnp.minimum(_count(row), _MOST_COUNTED)
    return _add_all(old, counts.astype(jnp.uint32))


# Padding has status OK, which is not counted; a call ticks once.
_COUNTED = np.arange(NUM_COUNTERS, dtype=np.int32)
_COUNTED[Status.OK] = NUM_COUNTERS
_MOST_COUNTED = np.full(NUM_COUNTERS, I32.max, np.int32)
_MOST_COUNTED[Counter.CLOCK] = 1


def _count(row: jax.Array) -> jax.Array:
    """Return the occurrences of each counter in `row`, i32[B], as i32[counters]."""
    if row.shape[0] <= MOST_COMPARED:
        return jnp.sum(row[:, None] == _COUNTED[None], axis=0, dtype=jnp.int32)
    row = jnp.where(row == Status.OK, NUM_COUNTERS, row)
    return scatter_add(jnp.zeros((NUM_COUNTERS,), jnp.int32), row, 1)


def mark_used(
    metadata: Metadata,
    row: jax.Array,
    before: SequenceRow,
    context_lengths: jax.Array | None = None,
) -> Metadata:
    """Stamp distinct rows, i32[B], as used by this call; a row of S is dropped.

    Args:
      metadata: the metadata.
      row: i32[B].
      before: the current values of these rows.
      context_lengths: i32[B], new lengths; None leaves them.
    """
    if context_lengths is not None:
        before = before._replace(context_length=context_lengths)
    stamp = metadata.sequences.next_stamp
    used = before._replace(last_used=stamp, num_uses=before.num_uses + 1)
    return metadata.with_rows(row, used)


def mark_parents(metadata: Metadata, row: jax.Array) -> Metadata:
    """Stamp rows, i32[B], as used by this call, counting each mention."""
    sequences = metadata.sequences
    last_used, num_uses = (
        jnp.full(row.shape, SequenceRow._fields.index(name), jnp.int32)
        for name in ("last_used", "num_uses")
    )
    rows = scatter(sequences.rows, (row, last_used), sequences.next_stamp)
    rows = scatter_add(rows, (row, num_uses), 1)
    return metadata.with_sequences(rows=rows)


def _add_all(old: jax.Array, increments: jax.Array) -> jax.Array:
    """Add u32[counters] to the counters, carrying into the high words."""
    carries = (old[:, 0] + increments < old[:, 0]).astype(jnp.uint32)
    return old + jnp.stack([increments, carries], axis=1)

"""Detection of shared prefixes among the decoding requests of a step.

Block tables are compared, so samples, beams and requests with one system prompt are all
found. Reference counts and the sort order are only hints: a wrong hint costs savings,
not correctness.
Symbols: `B` requests, `S` rows of the block tables, `M` blocks per row, `N` blocks.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import Requests
from jkv.operations import (
    fori_loop,
    gather,
    is_manual,
    vary_over,
    varying_axes,
    while_loop,
)

# Columns of the tables compared in one trip.
_COLUMNS = 64

# Requests are sorted by their last block with more references than these numbers, so
# that the requests of a group, and of its smaller groups, are adjacent.
_OWNERS = 4, 2


class SharedPrefixes(NamedTuple):
    """The requests in an order that makes requests with a shared prefix adjacent.

    Two places share as many leading blocks as the least of `common` after the first up
    to the second. A place's run are the places from it on that share more blocks with
    it than it shares with the place before.
    """

    order: jax.Array  # i32[B], request of each place
    common: jax.Array  # i32[B], leading blocks shared with the place before
    sizes: jax.Array  # i32[B], places of its run, itself counted


@functools.partial(jax.jit, static_argnames=("block_size", "fewest", "has_branches"))
def find_shared_prefixes(
    # of one row each; padding may name any table row
    requests: Requests,
    reference_counts: jax.Array,  # i32[N]
    *,
    block_size: int,  # T
    fewest: int = 2,  # least candidates for a comparison
    # skip the comparison by a conditional; on a GPU, where the host reads its
    # predicate, that costs more than it saves
    has_branches: bool = True,
) -> SharedPrefixes:
    """Find shared leading blocks, except the last block of each context."""
    if not has_branches:
        return _search(
            requests, reference_counts, block_size=block_size, has_branches=False
        )
    given = requests, reference_counts
    axes = varying_axes(given) if is_manual() else frozenset[str]()
    search = functools.partial(_search, block_size=block_size, has_branches=True)
    may_share = _find_candidates(*given, block_size)[2]
    return lax.cond(
        jnp.sum(may_share, dtype=jnp.int32) >= fewest,
        lambda *given: vary_over(search(*given), axes),
        lambda *given: vary_over(_none(given[0].seq_ids.shape[0]), axes),
        *given,
    )


def _find_candidates(
    requests: Requests, owners: jax.Array, block_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each request's row and first block, and if that block is shared."""
    row, is_candidate = _find_rows(requests, block_size)
    # The barriers keep XLA on CPU from fusing both gathers into a parallel task.
    first_block = lax.optimization_barrier(gather(requests.block_tables[:, 0], row))
    num_owners = lax.optimization_barrier(gather(owners, first_block))
    return row, first_block, is_candidate & (num_owners > 1)


def _find_rows(requests: Requests, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Return each request's table row, and if it is decoding with a whole block."""
    is_candidate = (requests.query_lengths == 1) & (
        requests.context_lengths > block_size
    )
    return jnp.clip(
        requests.seq_ids, 0, requests.block_tables.shape[0] - 1
    ), is_candidate


def _none(num_requests: int) -> SharedPrefixes:
    order = jnp.arange(num_requests, dtype=jnp.int32)
    return SharedPrefixes(order, jnp.zeros_like(order), jnp.ones_like(order))


def _search(
    requests: Requests, owners: jax.Array, *, block_size: int, has_branches: bool
) -> SharedPrefixes:
    tables = requests.block_tables
    if has_branches:
        row, first_block, may_share = _find_candidates(requests, owners, block_size)
    else:  # unshared requests are compared as well
        row, may_share = _find_rows(requests, block_size)
        first_block = gather(tables, (row, jnp.zeros_like(row)))
    index = jnp.arange(row.shape[0], dtype=jnp.int32)
    last = lax.div(requests.context_lengths - 1, jnp.int32(block_size))
    last = jnp.where(may_share, last, 0)
    keys = [jnp.where(may_share, first_block, owners.shape[0] + index)]
    find_keys = _find_keys if has_branches else _find_keys_at_once
    keys.extend(find_keys(tables, owners, row, last))
    order = lax.sort((*keys, index), num_keys=len(keys))[-1]
    width = min(_COLUMNS, tables.shape[1]) if has_branches else tables.shape[1]
    common = _compare(tables, gather(row, order), gather(last, order), width)
    ends = (index[None] > index[:, None]) & (common[None] <= common[:, None])
    sizes = jnp.min(jnp.where(ends, index[None], row.shape[0]), axis=1) - index
    return SharedPrefixes(order, common, sizes)


def _find_keys(
    tables: jax.Array, owners: jax.Array, row: jax.Array, last: jax.Array
) -> list[jax.Array]:
    """Return the last leading block with more references than each number, i32[B].

    Uses bisection, as reference counts do not increase along a sequence.
    """

    numbers = jnp.array(_OWNERS, jnp.int32)[:, None]

    def halve(_: jax.Array, ends: tuple[jax.Array, jax.Array]) -> Any:
        low, high = ends
        middle = lax.div(low + high + 1, jnp.int32(2))
        is_owned = gather(owners, gather(tables, (row, middle - 1))) > numbers
        is_owned |= middle == 0
        return jnp.where(is_owned, middle, low), jnp.where(is_owned, high, middle - 1)

    last = jnp.broadcast_to(last, (len(_OWNERS), *last.shape))
    row = jnp.broadcast_to(row, last.shape)
    trips = jnp.int32(0), jnp.int32(tables.shape[1].bit_length())
    counts = fori_loop(*trips, halve, (jnp.zeros_like(last), last))[0]
    return list(gather(tables, (row, counts - 1)))


def _find_keys_at_once(
    tables: jax.Array, owners: jax.Array, row: jax.Array, last: jax.Array
) -> jax.Array:
    """Return the same as i32[2, B] without bisection, for few launches on a GPU."""
    width = tables.shape[1]
    column = jnp.arange(width, dtype=jnp.int32)[None]
    owned = gather(owners, gather(tables, (row[:, None], column)))
    is_owned = owned[None] > jnp.array(_OWNERS, jnp.int32)[:, None, None]
    is_owned &= (column < last[:, None])[None]
    count = jnp.min(jnp.where(is_owned, width, column[None]), axis=2)
    return gather(tables, (row[None], count - 1))


def _compare(
    tables: jax.Array, row: jax.Array, last: jax.Array, width: int
) -> jax.Array:
    """Return the number of leading blocks equal to the place before, i32[B].

    Compares up to the last block of the shorter context, `width` columns per trip.
    """
    most = jnp.minimum(last, jnp.roll(last, 1)).at[0].set(0)

    def goes_on(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        column, common = carry
        return jnp.any((common == column) & (most > column))

    def compare(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, common = carry
        column = start + jnp.arange(width, dtype=jnp.int32)[None]
        mine = gather(tables, (row[:, None], column))
        is_same = (mine == jnp.roll(mine, 1, axis=0)) & (column < most[:, None])
        same = jnp.min(jnp.where(is_same, start + width, column), axis=1)
        return start + width, jnp.where(common == start, same, common)

    start = jnp.int32(0), jnp.zeros_like(row)
    if width == tables.shape[1]:
        return compare(start)[1]
    return while_loop(goes_on, compare, start)[1]

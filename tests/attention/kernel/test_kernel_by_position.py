"""Position-based splits of the kernel: a row's bits do not depend on the batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention.served_shapes import Shape, find_tuning_here, fit
from support.jax_versions import few
from support.tolerances import assert_close, is_close

from jkv.attention import paged_attention
from jkv.attention.backend import Requests
from jkv.attention.kernel.tiles.variant import cut_rows
from jkv.attention.kernel.work.cutting import list_position_work, size_position_work
from jkv.attention.kernel.work.lists import PositionSizes
from jkv.attention.shared_prefixes import find_shared_prefixes

SHAPE = fit(Shape())
DIM, DTYPE = SHAPE.head_dim, SHAPE.queries
TUNING = find_tuning_here(SHAPE)
# Tokens of a piece, 16 if interpreted; a block is half of one.
PIECE = TUNING.piece_tokens
ROWS, REQUESTS, BLOCK, COLUMNS = 12, 4, PIECE // 2, 9
HEADS, KV_HEADS = 6, 2
TILE_ROWS = cut_rows(HEADS // KV_HEADS, TUNING.position_tile(None))[1]
LENGTHS = (66, 39, 17)  # of the sequences: multiples of 16, and others
# Tokens before these if pieces are larger: the same number of pieces, with equal ends.
BEFORE = tuple(length // 16 * (PIECE - 16) for length in LENGTHS)
OPTIONS = {
    "plain": {},
    "everything": {"window": 21, "soft_cap": 2.0, "scale": 0.3, "has_sinks": True},
}
WITHOUT_WINDOW = {
    "plain": {},
    "all but a window": {"soft_cap": 2.0, "scale": 0.3, "has_sinks": True},
}


def draw():
    """Draw queries of every token, and a pool with blocks in random order."""
    rng = np.random.default_rng(3)
    counts = [-(-sum(n) // BLOCK) for n in zip(LENGTHS, BEFORE, strict=True)]
    tables = np.full((len(LENGTHS), COLUMNS), 2**31 - 1, np.int32)
    free = iter(rng.permutation(sum(counts)).tolist())
    for row, count in enumerate(counts):
        tables[row, :count] = [next(free) for _ in range(count)]
    shape = 1, sum(counts), KV_HEADS, BLOCK, DIM
    pools = [rng.standard_normal(shape).astype(DTYPE) for _ in "kv"]
    queries = rng.standard_normal((3, 80, HEADS, DIM)).astype(DTYPE)
    return queries, pools, tables


def assert_same_bits(one, other, message=""):
    pair = (
        np.asarray(array).view(f"u{array.dtype.itemsize}") for array in (one, other)
    )
    np.testing.assert_array_equal(*pair, err_msg=message)


@functools.cache
def make_attend(options, implementation="pallas", by_position=True):
    fields = dict((OPTIONS | WITHOUT_WINDOW)[options])
    sinks = jnp.linspace(-1, 2, HEADS) if fields.pop("has_sinks", False) else None

    @jax.jit
    def attend(*arguments, work_lists=None):
        return paged_attention(
            *arguments,
            work_lists=work_lists,
            sinks=sinks,
            return_lse=True,
            by_position=by_position,
            implementation=implementation,
            **fields,
        )

    return attend


def compute(attend, ranges):
    """Return a call's results for rows of requests (sequence, first position, rows)."""
    queries, pools, tables = draw()
    rows = np.full((ROWS, HEADS, DIM), 7.0, DTYPE)
    ids, starts, counts, contexts = np.zeros((4, REQUESTS), np.int32)
    ids[:], row, found = -1, 0, {}
    for number, (sequence, first, count) in enumerate(ranges):
        ids[number], starts[number], counts[number] = sequence, row, count
        contexts[number] = BEFORE[sequence] + first + count
        rows[row : row + count] = queries[sequence, first : first + count]
        for offset in range(count):
            found[sequence, first + offset] = row + offset
        row += count
    answer = attend(rows, *pools, 0, tables, ids, starts, counts, contexts)
    output, lse = (np.asarray(array) for array in answer)
    assert not output[row:].any() and np.isneginf(lse[row:]).all()
    return {name: (output[row], lse[row]) for name, row in found.items()}


# Rows 60 to 65 of the longest sequence cross the start of a piece; the other sequences'
# last rows are in the same tile, before it, after it, or absent.
TOGETHER = [(0, 60, 6), (1, 38, 1), (2, 14, 3)]
CALLS = {
    "alone, row by row": [[(0, 63, 1)], [(0, 64, 1)], [(1, 38, 1)]],
    "single rows side by side": [[(2, 16, 1), (0, 65, 1), (1, 38, 1)]],
    "another order": [[(2, 14, 3), (1, 38, 1), (0, 60, 6)]],
    "in a longer chunk": [[(0, 54, 12)], [(1, 30, 9), (2, 14, 3)]],
    "in chunks cut elsewhere": [[(2, 13, 2), (0, 61, 5)], [(2, 15, 2), (0, 59, 3)]],
}


@pytest.mark.newest_further
@pytest.mark.parametrize("options", few(OPTIONS, "everything"))
def test_a_rows_bits_do_not_depend_on_the_batch(options):
    attend = make_attend(options)
    known = compute(attend, TOGETHER)
    assert len(known) == 10
    seen = 0
    for name, calls in CALLS.items():
        for ranges in calls:
            for row, found in compute(attend, ranges).items():
                if row in known:
                    seen += 1
                    for one, other in zip(found, known[row], strict=True):
                        assert_same_bits(one, other, f"{name}, {row}")
    assert seen == 36
    # The result is attention; the default lists change these bits.
    expected = compute(make_attend(options, "reference", False), TOGETHER)
    for row, found in known.items():
        for one, other in zip(found, expected[row], strict=True):
            assert_close(one, other)
        assert not is_close(np.zeros_like(found[0]), expected[row][0])


def make_branches():
    """Return a call of six branches of one sequence, a chunk, and a single request."""
    rng = np.random.default_rng(5)
    shape = 1, 100, KV_HEADS, BLOCK, DIM
    pools = [rng.standard_normal(shape).astype(DTYPE) for _ in "kv"]
    tables = rng.permutation(8 * COLUMNS).reshape(8, COLUMNS).astype(np.int32)
    # The first six share nine blocks of half a piece, in trie order.
    for row, parent, count in ((1, 0, 6), (2, 1, 3), (3, 0, 6), (4, 0, 7), (5, 4, 7)):
        tables[row, :count] = tables[parent, :count]
    order = np.int32([3, 7, 0, 5, 6, 1, 4, 2])
    counts = np.where(order == 7, 5, 1).astype(np.int32)
    contexts = np.int32([72, 70, 66, 58, 61, 64, 50, 35])[order] * (BLOCK // 8)
    starts = (np.cumsum(counts) - counts).astype(np.int32)
    queries = rng.standard_normal((ROWS, HEADS, DIM)).astype(DTYPE)
    return queries, *pools, 0, tables, order, starts, counts, contexts


def list_branches(arguments):
    """Return the work lists of that call, as a step's plan has them on a GPU."""
    tables, *others = map(jnp.asarray, arguments[4:])
    requests = Requests(tables, *others)
    owners = jnp.bincount(tables.reshape(-1), length=100).astype(jnp.int32)
    cut = {"piece_tokens": PIECE, "max_pieces": TUNING.max_pieces}
    sizes = size_position_work(ROWS, 8, COLUMNS * BLOCK, TILE_ROWS, **cut)
    shared = find_shared_prefixes(
        requests, owners, block_size=BLOCK, has_branches=False
    )
    return list_position_work(requests, sizes, part_size=BLOCK, shared=shared)


@pytest.mark.newest_further
@pytest.mark.parametrize("options", few([*WITHOUT_WINDOW, "everything"], "plain"))
def test_shared_prefixes_are_read_in_one_tile_bit_identically(options):
    """Tiles use the block table of their first request; other tables are not read."""
    attend, arguments = make_attend(options), make_branches()
    expected = attend(*arguments)
    listed = list_branches(arguments)
    lists = {"pallas": (listed,)}
    shared = jax.jit(functools.partial(attend, work_lists=lists))
    assert np.abs(expected[0]).max() > 0.1
    for one, other in zip(shared(*arguments), expected, strict=True):
        assert_same_bits(one, other)
    end, first = np.asarray(listed.lanes.end), np.asarray(listed.lanes.first)
    read = np.maximum(end - first[:, None], 0)
    # Tiles that rows attend to, and tiles that programs read: once per program.
    assert read.sum() == 5 + 5 + 5 + 4 + 4 + 4 + 4 + 5 * 3
    assert read.max(axis=1).sum() == 27
    if options == "everything":  # windows differ by row, so nothing is shared
        return
    tables = arguments[4].copy()
    where = np.asarray(listed.work.table)
    for row, count in zip(where, first * 2, strict=True):
        tables[row, :count] = 2**20
    broken = shared(*arguments[:4], tables, *arguments[5:])
    for one, other in zip(broken, expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.one_end
def test_default_pieces_change_bits():
    attend = make_attend("plain", by_position=False)
    known = compute(attend, TOGETHER)
    alone = compute(attend, [(0, 65, 1)])
    assert (alone[0, 65][0] != known[0, 65][0]).any()


@pytest.mark.one_end
def test_piece_sizes_follow_from_the_longest_context():
    """256 tokens, or a larger power of two if there would be more than 16 pieces."""
    sizes = {
        longest: size_position_work(
            64, 64, longest, 4, piece_tokens=256, max_pieces=16
        )[3:]
        for longest in (1, 40, 4096, 4097, 2**17)
    }
    expected = {1: (256, 1), 40: (256, 1), 4096: (256, 16)}
    assert sizes == expected | {4097: (512, 9), 2**17: (8192, 16)}


@pytest.mark.one_end
def test_every_row_is_in_one_tile():
    """Ragged requests in tiles of 4: the number of tiles, and the tile of each row."""
    requests = Requests(
        block_tables=jnp.zeros((4, 9), jnp.int32),
        seq_ids=jnp.arange(4),
        query_starts=jnp.array([0, 5, 12, 6]),
        query_lengths=jnp.array([5, 1, 0, 6]),
        context_lengths=jnp.array([34, 16, 9, 6]),
    )
    sizes = size_position_work(12, 4, 72, 4, piece_tokens=16, max_pieces=8)
    assert sizes == PositionSizes(12, 6, 4, 16, 5)
    listed = list_position_work(requests, sizes)
    work = [np.asarray(array).tolist() for array in listed.work]
    table, row, num_rows, _, first, end = work
    assert num_rows == [1, 4, 1, 2, 4, 0] and row[:5] == [4, 0, 5, 10, 6]
    assert table[:5] == [0, 0, 1, 3, 3] and first == [0] * 6
    assert end == [34, 33, 16, 6, 4, 0]
    pieces = np.asarray(listed.pieces.end - listed.pieces.first).tolist()
    # Positions 29 to 33, 15, and 0 to 5.
    assert pieces == [2, 2, 2, 3, 3, 1, 1, 1, 1, 1, 1, 1]
    np.testing.assert_array_equal(listed.pieces.first, np.arange(12) * 5)

"""Work lists of the kernels: complete, without duplicates, and balanced."""

import jax
import numpy as np
import pytest

from jkv.attention.backend import Requests, make_requests
from jkv.attention.kernel.work.cutting import (
    list_decode_work,
    list_prefill_work,
    size_decode_work,
    size_prefill_work,
)

pytestmark = pytest.mark.one_end

MAX_TOKENS = 4096
# As in a step: all lists in one program.
plan = jax.jit(
    make_requests, static_argnames=("num_rows", "block_size", "max_query_length")
)


def random_requests(rng, num_requests, num_rows, decode_share):
    """Draw requests with lengths over three orders of magnitude, some padding."""
    lengths, rows_left = [], num_rows
    for _ in range(num_requests):
        most = min(rows_left, 1 if rng.random() < decode_share else 40)
        lengths.append(int(rng.integers(0, most + 1)))
        rows_left -= lengths[-1]
    starts = np.cumsum(lengths) - lengths
    contexts = np.exp(rng.uniform(0, np.log(MAX_TOKENS), num_requests)).astype(np.int32)
    contexts = np.maximum(
        contexts, np.array(lengths) - rng.integers(0, 2, num_requests)
    )
    seq_ids = rng.permutation(num_requests + 3)[:num_requests]
    tables = np.zeros((num_requests + 2, MAX_TOKENS // 16), np.int32)
    arrays = (np.asarray(a, np.int32) for a in (seq_ids, starts, lengths, contexts))
    return plan(
        Requests(tables, *arrays),
        num_rows=num_rows,
        block_size=16,
        max_query_length=None,
    )


def seen_tokens(requests, window, *, decode):
    """Return (sequence, row, visible tokens) of every row, by definition."""
    seen = {}
    for seq, start, length, context in zip(
        *(np.asarray(array).tolist() for array in requests[1:]), strict=True
    ):
        if (length == 1) != decode:
            continue
        for row in range(length):
            position = context - length + row
            first = 0 if window is None else max(0, position - window + 1)
            if position >= first:
                seen[start + row] = (seq, list(range(first, position + 1)))
    return seen


@pytest.mark.parametrize("window", [None, 1, 100, 10_000, 0])
def test_decode_pieces_cover_every_context_once(window):
    rng = np.random.default_rng(0)
    num_requests, num_rows, target = 9, 12, 20
    sizes = size_decode_work(num_rows, num_requests, MAX_TOKENS, target)
    num_entries = sizes.num_entries
    assert num_entries == target
    build = jax.jit(lambda requests, window: list_decode_work(requests, window, sizes))
    traced = None if window is None else np.int32(window)
    for _ in range(20):
        requests = random_requests(rng, num_requests, num_rows, 0.8)
        listed = jax.tree.map(np.asarray, build(requests, traced))
        work, pieces = listed.work, listed.pieces
        expected = seen_tokens(requests, window, decode=True)
        longest = 0
        for row in range(num_rows):
            mine = range(pieces.first[row], pieces.end[row])
            found = [t for p in mine for t in range(work.first[p], work.end[p])]
            assert (row in expected) == bool(found)
            for piece in mine:
                assert work.num_rows[piece] == 1 and work.row[piece] == row
                assert work.table[piece] == expected[row][0]
                assert work.first[piece] < work.end[piece]
                longest = max(longest, work.end[piece] - work.first[piece])
            if found:
                assert found == expected[row][1]
        # Unused entries do nothing.
        assert work.num_rows.sum() == (pieces.end - pieces.first).sum()
        idle = work.num_rows == 0
        assert not work.first[idle].any() and not work.end[idle].any()
        # No program reads much more than its share, or than the smallest useful piece.
        total = sum(len(tokens) for _, tokens in expected.values())
        share = total / (target - num_requests)
        assert longest <= max(256, share + 64 * (1 + num_requests / target))


def test_prefill_tiles_cover_every_row_once():
    rng = np.random.default_rng(1)
    num_requests, num_rows, tile_rows = 7, 60, 8
    sizes = size_prefill_work(num_rows, num_requests, tile_rows)
    build = jax.jit(lambda requests: list_prefill_work(requests, sizes))
    for _ in range(20):
        requests = random_requests(rng, num_requests, num_rows, 0.3)
        work = jax.device_get(build(requests).work)
        expected = seen_tokens(requests, None, decode=False)
        found = {}
        for entry in range(sizes.num_entries):
            assert work.num_rows[entry] <= tile_rows
            for offset in range(work.num_rows[entry]):
                position = work.position[entry] + offset
                if position < 0:
                    continue
                assert work.first[entry] == 0 and position < work.end[entry]
                row = int(work.row[entry] + offset)
                assert row not in found
                found[row] = (work.table[entry], list(range(position + 1)))
        assert found == expected


@pytest.mark.one_end
@pytest.mark.parametrize("window", [None, 70])
def test_one_list_covers_every_part_of_the_blocks(window):
    """Pieces cover all tokens of a part that a row attends to, and few others."""
    num_parts, part_size = 3, 4
    rng = np.random.default_rng(2)
    sizes = size_decode_work(12, 9, MAX_TOKENS // num_parts, 20)
    build = jax.jit(
        lambda requests: list_decode_work(
            requests, window, sizes, num_parts=num_parts, part_size=part_size
        )
    )
    for _ in range(10):
        requests = random_requests(rng, 9, 12, 0.8)
        listed = jax.tree.map(np.asarray, build(requests))
        work, pieces = listed.work, listed.pieces
        for row, (_, tokens) in seen_tokens(requests, window, decode=True).items():
            mine = range(pieces.first[row], pieces.end[row])
            reached = [t for p in mine for t in range(work.first[p], work.end[p])]
            assert len(set(reached)) == len(reached)
            assert {work.position[p] for p in mine} == {tokens[-1]}
            of_part = np.asarray(tokens) // part_size % num_parts
            for part in range(num_parts):
                held = np.asarray(tokens)[of_part == part]
                places = held // (num_parts * part_size) * part_size + held % part_size
                assert set(places.tolist()) <= set(reached)
                assert len(reached) <= len(held) + 2 * part_size


def test_sizes_equal_hand_computed_values():
    # 64 sequences over 8 kv heads: 304 pieces for 2432 programs. 300 sequences may need
    # one more each than half as many.
    assert size_decode_work(64, 64, 131_072, 304).num_entries == 304
    assert size_decode_work(300, 300, 131_072, 304).num_entries == 452
    # Contexts of 512 tokens: pieces of 64, as there are fewer than units, and one more
    # each if a window starts within one.
    assert size_decode_work(4, 4, 512, 304).num_entries == 36
    assert size_decode_work(1, 8, 512, 304).num_entries == 9
    assert size_prefill_work(64, 4, 16).num_entries == 8
    assert size_prefill_work(3, 4, 16).num_entries == 1


def list_alike(contexts, rows, target):
    """List pieces of one-row requests, which may share a row."""
    requests = plan(
        Requests(
            block_tables=np.zeros((len(contexts), MAX_TOKENS // 16), np.int32),
            seq_ids=np.arange(len(rows), dtype=np.int32),
            query_starts=np.asarray(rows, np.int32),
            query_lengths=np.ones(len(rows), np.int32),
            context_lengths=np.asarray(contexts, np.int32),
        ),
        num_rows=len(rows),
        block_size=16,
        max_query_length=None,
    )
    sizes = size_decode_work(len(rows), len(rows), MAX_TOKENS, target)
    build = jax.jit(lambda requests: list_decode_work(requests, None, sizes))
    listed = jax.device_get(build(requests))
    return listed.work, listed.pieces, sizes.num_entries


@pytest.mark.parametrize("count, pieces, longest", [(1, 64, 64), (16, 256, 256)])
def test_few_pieces_are_split_further(count, pieces, longest):
    """One context in pieces of 64 tokens, or of 16 up to the device's capacity."""
    work, _, _ = list_alike([4096] * count, range(count), target=304)
    assert work.num_rows.sum() == pieces <= 304
    assert (work.end - work.first).max() == longest


def test_a_row_of_several_requests_is_listed():
    _, pieces, num_entries = list_alike([4096] * 6, [0, 0, 0, 0, 1, 1], target=40)
    assert int(pieces.first.min()) >= 0 and int(pieces.end.max()) == num_entries


def test_the_last_tile_of_a_prompt_comes_first():
    """The last tile reads most, so that the others overlap with it."""
    rng = np.random.default_rng(1)
    requests = random_requests(rng, 3, 60, 0.0)
    sizes = size_prefill_work(60, 3, 8)
    work = jax.jit(lambda requests: list_prefill_work(requests, sizes))(requests).work
    alive = np.asarray(work.num_rows) > 0
    ends, table = np.asarray(work.end)[alive], np.asarray(work.table)[alive]
    same = table[1:] == table[:-1]
    assert same.any() and (np.diff(ends)[same] < 0).all()

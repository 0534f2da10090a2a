"""Shared-prefix attention: detected prefixes, single reads, and results."""

import dataclasses
import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention.served_shapes import Shape, find_tuning_here, fit
from support.caches.plain_prefixes import check_prefixes
from support.jax_versions import further
from support.tolerances import assert_close

import jkv
from jkv.attention.backend import DeviceType, Requests
from jkv.attention.kernel import interface
from jkv.attention.kernel.tiles.table import INTERPRETED
from jkv.attention.kernel.tiles.variant import count_decode_pieces, count_lanes
from jkv.attention.kernel.work import planning
from jkv.attention.kernel.work.cutting import list_decode_work, size_decode_work
from jkv.attention.shared_prefixes import find_shared_prefixes
from jkv.verbs.attending import plan_attention

BLOCK_SIZE, NUM_COLUMNS, NUM_REQUESTS = 4, 90, 12


def draw_tables(rng):
    """Draw tables with common prefixes, and the number of used blocks of each."""
    tables = np.arange(NUM_REQUESTS * NUM_COLUMNS, dtype=np.int32)
    tables = rng.permutation(tables).reshape(NUM_REQUESTS, NUM_COLUMNS)
    counts = rng.integers(1, NUM_COLUMNS + 1, NUM_REQUESTS)
    for number in range(1, NUM_REQUESTS):
        if rng.random() < 0.8:
            parent, count = rng.integers(number), rng.integers(1, NUM_COLUMNS)
            tables[number, :count] = tables[parent, :count]
    return rng.permutation(tables), counts


def make_requests(tables, counts):
    """Return requests that fill their blocks except for one token."""
    rows = np.arange(NUM_REQUESTS, dtype=np.int32)
    ones, contexts = np.ones_like(rows), np.int32(counts * BLOCK_SIZE - 1)
    return Requests(tables, rows, rows, ones, contexts)


def find(tables, counts, fewest=3, has_branches=True):
    """Return the shared prefixes, as on a CPU or, without branches, on a GPU."""
    requests = make_requests(tables, counts)
    used = np.arange(NUM_COLUMNS)[None] < counts[:, None]
    owners = np.bincount(tables[used], minlength=tables.max() + 1).astype(np.int32)
    return find_shared_prefixes(
        requests,
        owners,
        block_size=BLOCK_SIZE,
        fewest=fewest,
        has_branches=has_branches,
    )


@functools.partial(jax.jit, static_argnames=("num_lanes", "wanted"))
def list_lanes(requests, shared, num_lanes, wanted=40):
    """Return the kernel's work list for shared prefixes."""
    most = NUM_COLUMNS * BLOCK_SIZE
    given = NUM_REQUESTS, NUM_REQUESTS, most, wanted
    sizes = size_decode_work(*given, num_lanes=num_lanes)
    return list_decode_work(requests, None, sizes, part_size=BLOCK_SIZE, shared=shared)


@pytest.mark.one_end
@pytest.mark.parametrize("num_lanes", [2, 4, 16])
def test_lanes_read_each_of_their_tokens_once(num_lanes):
    """Tokens are read in order, with each lane's offsets, and only from its table."""
    rng, num_shared = np.random.default_rng(4), 0
    for _ in range(20):
        tables, counts = draw_tables(rng)
        requests = make_requests(tables, counts)
        listed = list_lanes(
            requests, find(tables, counts, has_branches=False), num_lanes
        )
        work, pieces, lanes = jax.tree.map(
            np.asarray, (listed.work, listed.pieces, listed.lanes)
        )
        found = {}
        for entry, count in enumerate(work.num_rows):
            tokens = range(work.first[entry], work.end[entry])
            assert len(tokens) > 0 if count else not len(tokens)
            read = tables[work.table[entry], np.array(tokens, int) // BLOCK_SIZE]
            rows, places = (each[entry, :count] for each in lanes)
            for row, place in zip(rows, places, strict=True):
                own = tables[row, np.array(tokens, int) // BLOCK_SIZE]
                assert (read == own).all() and place not in found
                found[place] = row, tokens
            num_shared += len(tokens) * max(count - 1, 0)
        for row, count in enumerate(counts):
            mine = [found.pop(n) for n in range(pieces.first[row], pieces.end[row])]
            assert {each[0] for each in mine} == {row}
            tokens = [token for each in mine for token in each[1]]
            assert tokens == [*range(count * BLOCK_SIZE - 1)]
        assert not found
    assert num_shared > 20 * 64


@pytest.mark.one_end
def test_unshared_requests_have_the_usual_pieces():
    rng = np.random.default_rng(5)
    tables, counts = draw_tables(rng)
    tables = np.arange(tables.size, dtype=np.int32).reshape(tables.shape)
    found = find(tables, counts)
    assert not np.any(found.common)
    with_lanes = list_lanes(make_requests(tables, counts), found, 4)
    alone = list_lanes(make_requests(tables, counts), None, 1)
    alive = np.flatnonzero(alone.work.num_rows)
    assert with_lanes.work.num_rows.sum() == len(alive) > NUM_REQUESTS
    for one, other in zip(with_lanes.work, alone.work, strict=True):
        np.testing.assert_array_equal(one[alive], other[alive])
    for one, other in zip(with_lanes.pieces, alone.pieces, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.newest_further
def test_shared_prefixes_equal_common_table_columns():
    """For random trees; replacing a block in one row ends its shared prefix."""
    rng, total = np.random.default_rng(1), 0
    for _ in range(40):
        tables, counts = draw_tables(rng)
        if rng.random() < 0.5:
            row, column = rng.integers(NUM_REQUESTS), rng.integers(NUM_COLUMNS)
            tables[row, column] = tables.max() + 1
        in_front = [
            row[: n - 1] for row, n in zip(tables.tolist(), counts, strict=True)
        ]
        for has_branches in (True, False):
            found = find(tables, counts, has_branches=has_branches)
            total += check_prefixes(found, in_front, 3)
    assert total > 2000


SHAPE = fit(Shape())


@pytest.mark.newest_further
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_attention_on_random_trees_equals_the_reference(implementation):
    """Lanes start and end anywhere; none reads another's blocks."""
    rng = np.random.default_rng(2)
    dim, dtype, tuning = SHAPE.head_dim, SHAPE.queries, find_tuning_here(SHAPE)
    size = NUM_REQUESTS * NUM_COLUMNS + 1, 2, BLOCK_SIZE, dim
    pools = [jnp.array(rng.standard_normal((1, *size)), dtype) for _ in "kv"]
    queries = rng.standard_normal((NUM_REQUESTS, 4, dim)).astype(dtype)
    rows = np.arange(NUM_REQUESTS, dtype=np.int32)
    num_left = num_spoiled = 0

    @functools.partial(jax.jit, static_argnames="implementation")
    def attend(tables, contexts, lists=None, pools=pools, implementation="xla"):
        given = tables, None, rows, np.ones_like(rows), contexts
        return jkv.paged_attention(
            *(queries, *pools, 0, *given),
            work_lists=lists,
            max_query_length=1,
            implementation=implementation,
        )

    for _ in range(12):
        tables, counts = draw_tables(rng)
        contexts, found = np.int32(counts * BLOCK_SIZE - 1), find(tables, counts)
        lists = {"xla": found}
        if implementation == "pallas":
            requests = make_requests(tables, counts)
            work = list_lanes(
                requests,
                find(tables, counts, has_branches=False),
                count_lanes(2, tuning),
                wanted=count_decode_pieces(2, 2, tuning),
            )
            assert work.lanes is not None
            lists = {"pallas": (work,)}
        attend_listed = functools.partial(
            attend, tables, contexts, lists, implementation=implementation
        )
        output = attend_listed()
        assert_close(output, attend(tables, contexts, implementation="reference"))
        # Non-finite values affect only the requests with that block.
        row = rng.integers(NUM_REQUESTS)
        block = tables[row, rng.integers(counts[row])]
        used = np.arange(NUM_COLUMNS)[None] < counts[:, None]
        has_block = ((tables == block) & used).any(axis=1)
        spoiled = attend_listed(pools=[each.at[0, block].set(np.nan) for each in pools])
        np.testing.assert_array_equal(spoiled[~has_block], output[~has_block])
        assert np.isnan(spoiled[has_block]).all()
        num_spoiled += has_block.sum()
        common = np.asarray(found.common)
        num_left += np.sum((common[1:-1] > common[2:]) & (common[2:] > 0))
    assert num_left > 10 and num_spoiled > 12


def test_nested_groups_are_adjacent():
    """A common system prompt, then three prompts of four requests each, shuffled."""
    tables = np.arange(NUM_REQUESTS * NUM_COLUMNS, dtype=np.int32)
    tables = tables.reshape(NUM_REQUESTS, NUM_COLUMNS)
    tables[:, :20] = tables[0, :20]
    for first in (0, 4, 8):
        tables[first : first + 4, :70] = tables[first, :70]
    tables = np.random.default_rng(0).permutation(tables)
    found = find(tables, np.full(NUM_REQUESTS, NUM_COLUMNS))
    common, sizes = np.asarray(found.common), np.asarray(found.sizes)
    assert common.tolist() == [0, 70, 70, 70, 20, 70, 70, 70, 20, 70, 70, 70]
    assert sizes[[0, 4, 8]].tolist() == [12, 4, 4]
    # Two requests are below the threshold.
    few = np.ones(NUM_REQUESTS, np.int32)
    few[:2] = NUM_COLUMNS
    assert not np.any(find(tables, few).common)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A cache, and options of its attention."""

    group: int = 1  # query heads per kv head
    soft_cap: float | None = None
    has_sinks: bool = False
    cache: tuple[tuple[str, object], ...] = ()


CASES = {
    "plain": Case(),
    "sinks, soft cap, grouped": Case(group=4, soft_cap=2.0, has_sinks=True),
    "int8 keys, int4 values": Case(
        group=2, cache=(("dtype", "int8"), ("value_dtype", "int4"))
    ),
    "fp8": Case(cache=(("dtype", "fp8"),)),
    "latent": Case(
        group=8,
        cache=(
            *(("num_kv_heads", 1), ("head_dim", 96)),
            *(("value_head_dim", 64), ("values_in_keys", True)),
        ),
    ),
}
FURTHER = [name for name in CASES if name != "sinks, soft cap, grouped"]
ROWS = 10  # of a step: too many to loop over columns together


def make_config(case: Case):
    fields = dict(num_kv_heads=2, head_dim=64, dtype="float32") | dict(case.cache)
    return jkv.CacheConfig(
        num_layers=2,
        num_blocks=96,
        block_size=BLOCK_SIZE,
        max_sequences=20,
        max_context_length=1024,
        **fields,
    )


@functools.cache
def make_branches(case: Case, lengths=(41, 30, 20)):
    """Create ten sequences, nine of them branches of one, and a step of all.

    `lengths` are those of the common part, of the tenth sequence, and of the part that
    five of the branches share.
    """
    config, rng = make_config(case), np.random.default_rng(0)

    def grow(cache, seq_ids, count):
        num_rows = count * len(seq_ids)
        cache, batch = jkv.append(cache, seq_ids, count, capacity=num_rows)
        for layer in range(2):
            shape = num_rows, config.num_kv_heads
            keys = rng.standard_normal((*shape, config.head_dim), np.float32)
            values = rng.standard_normal((*shape, config.value_head_dim), np.float32)
            if config.values_in_keys:
                values = None
            cache = jkv.write(cache, layer, batch, keys, values)
        return cache, batch

    def fork(cache, parents):
        cache, forks = jkv.fork(cache, parents)
        jkv.raise_for_status(forks.status)
        return cache, np.asarray(forks.seq_ids)

    cache, opened = jkv.allocate(jkv.init(config), [0, 0])
    root, alone = np.asarray(opened.seq_ids)
    cache, _ = grow(cache, [root], lengths[0])
    cache, _ = grow(cache, [alone], lengths[1])
    cache, children = fork(cache, [root] * 5)
    cache, _ = grow(cache, children[:1], lengths[2])
    cache, grandchildren = fork(cache, [children[0]] * 4)
    cache, _ = jkv.free(cache, [root])
    sequences = rng.permutation([alone, *children, *grandchildren])
    cache, _ = grow(cache, sequences, 7)
    cache, batch = grow(cache, sequences, 1)
    queries = rng.standard_normal(
        (ROWS, config.num_kv_heads * case.group, config.head_dim), np.float32
    )
    return cache, batch, queries


def attend(cache, batch, queries, case: Case, **options):
    """Return output and log-sum-exp of the second layer."""
    sinks = np.linspace(-1, 1, queries.shape[1], dtype=np.float32)
    return jkv.attend(
        cache,
        1,
        batch,
        queries,
        soft_cap=case.soft_cap,
        sinks=sinks if case.has_sinks else None,
        return_lse=True,
        **options,
    )


def without_plan(batch):
    return dataclasses.replace(batch, plan=None)


def with_tables(cache, tables):
    group = dataclasses.replace(cache.metadata.groups[0], block_tables=tables)
    metadata = dataclasses.replace(cache.metadata, groups=(group,))
    return cache.with_metadata(metadata)


@pytest.mark.parametrize("name", ["sinks, soft cap, grouped", *further(FURTHER)])
@pytest.mark.one_end
def test_shared_reads_equal_separate_reads(name):
    """Shared blocks are read through one table, whatever the others hold there."""
    case = CASES[name]
    cache, batch, queries = make_branches(case)
    found = batch.plan[0]["xla"]
    tables = np.array(cache.metadata.groups[0].block_tables)
    lasts = (np.asarray(batch.context_lengths) - 1) // BLOCK_SIZE
    rows = [
        tables[seq_id, :last].tolist()
        for seq_id, last in zip(np.asarray(batch.seq_ids), lasts, strict=True)
    ]
    # Nine share ten blocks, and five of them five more.
    assert check_prefixes(found, rows, 3) == 8 * 10 + 4 * 5
    output, lse = attend(cache, batch, queries, case)
    expected, expected_lse = attend(cache, without_plan(batch), queries, case)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(output, expected, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)
    plain = attend(cache, batch, queries, case, implementation="reference")[0]
    assert_close(output, plain)

    order, common = np.asarray(found.order), np.asarray(found.common)
    seq_ids = np.asarray(batch.seq_ids)[order]
    # Nine form tiles of five and four, which use the tables of their first lanes.
    begin = int(np.flatnonzero(common)[0]) - 1 + 5
    for place, (seq_id, count) in enumerate(zip(seq_ids, common, strict=True)):
        if place != begin:
            tables[seq_id, :count] = 2**20
    broken = with_tables(cache, tables)
    for one, other in zip(
        attend(broken, batch, queries, case), (output, lse), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def plan_on_a_card(cache, batch):
    """Return the step as planned on a fake GPU, with the interpreter's tuning."""
    patch = unittest.mock.patch.object
    with (
        patch(interface, "find_gpu", lambda: DeviceType("cpu", "interpreted")),
        patch(planning, "find_local_tuning", lambda _: INTERPRETED),
    ):
        return plan_attention(cache, without_plan(batch))


# Tokens read only once, if the four or the five of the nine come first.
SAVED = {
    "plain": {8 * 128 + 4 * 128},
    "sinks, soft cap, grouped": {3 * 128 + 3 * 256},
    "int8 keys, int4 values": {4 * 128 + 3 * 256, 3 * 128 + 4 * 256},
    "fp8": {8 * 128 + 4 * 128},
    "latent": {2 * 128 + 2 * 256},
}


@pytest.mark.parametrize("name", ["sinks, soft cap, grouped", *further(FURTHER)])
@pytest.mark.one_end
@pytest.mark.interpreted(reason="its steps are planned for the interpreter's tiles")
def test_the_kernel_reads_shared_blocks_once(name):
    """They are read through the first request's table, whatever the others hold."""
    case = CASES[name]
    cache, batch, queries = make_branches(case, (170, 30, 90))
    batch = plan_on_a_card(cache, batch)
    found = attend(cache, batch, queries, case, implementation="pallas")
    expected = attend(cache, batch, queries, case, implementation="reference")
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)

    lists, num_lanes = batch.plan[0]["pallas"], 16 // case.group
    (listed,) = (each for each in lists if each.sizes.num_lanes == num_lanes)
    work, lanes = jax.tree.map(np.asarray, (listed.work, listed.lanes))
    num_read = (work.end - work.first).sum()
    assert np.asarray(batch.context_lengths).sum() - num_read in SAVED[name]
    tables = np.array(cache.metadata.groups[0].block_tables)
    for entry, count in enumerate(work.num_rows):
        others = np.asarray(batch.seq_ids)[lanes.row[entry, 1:count]]
        first, end = work.first[entry] // BLOCK_SIZE, work.end[entry] // BLOCK_SIZE
        tables[others, first:end] = 2**20
    broken = with_tables(cache, tables)
    again = attend(broken, batch, queries, case, implementation="pallas")
    for one, other in zip(again, found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.one_end
@pytest.mark.interpreted(reason="its steps are planned for the interpreter's tiles")
def test_windows_are_read_per_request():
    case = CASES["plain"]
    cache, batch, queries = make_branches(case, (170, 30, 90))
    batch = plan_on_a_card(cache, batch)
    given = cache, batch, queries, case
    output = attend(*given, window=150, implementation="pallas")[0]
    assert_close(output, attend(*given, window=150, implementation="reference")[0])


@pytest.mark.one_end
@pytest.mark.interpreted(reason="its steps are planned for the interpreter's tiles")
def test_unshared_steps_are_bit_identical_with_lanes():
    """Nothing is shared, in the program that supports shared blocks."""
    case = CASES["sinks, soft cap, grouped"]
    cache, batch, queries = make_branches(case, (170, 30, 90))
    alone = np.asarray(batch.plan[0]["xla"].common) == 0
    seq_ids = np.asarray(batch.seq_ids)[np.asarray(batch.plan[0]["xla"].order)[alone]]
    seq_ids = np.concatenate([seq_ids, np.full(ROWS - 2, jkv.NO_SEQUENCE)])
    cache, batch = jkv.append(cache, seq_ids)
    batch = plan_on_a_card(cache, batch)
    assert any(each.lanes is not None for each in batch.plan[0]["pallas"])
    found = attend(cache, batch, queries, case, implementation="pallas")
    batch = without_plan(batch)
    expected = attend(cache, batch, queries, case, implementation="pallas")
    assert np.abs(expected[0]).max() > 0.1
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.one_end
def test_unshared_steps_are_bit_identical_in_the_same_program():
    """A step of ten sequences, two of them active."""
    case = CASES["sinks, soft cap, grouped"]
    cache, batch, queries = make_branches(case)
    alone = np.asarray(batch.plan[0]["xla"].common) == 0
    seq_ids = np.asarray(batch.seq_ids)[np.asarray(batch.plan[0]["xla"].order)[alone]]
    assert len(seq_ids) == 2
    seq_ids = np.concatenate([seq_ids, np.full(ROWS - 2, jkv.NO_SEQUENCE)])
    cache, batch = jkv.append(cache, seq_ids)
    assert not np.any(batch.plan[0]["xla"].common)
    found = attend(cache, batch, queries, case)
    expected = attend(cache, without_plan(batch), queries, case)
    assert np.abs(expected[0]).max() > 0.1
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.one_end
def test_the_derivative_ignores_sharing():
    case = CASES["sinks, soft cap, grouped"]
    cache, batch, queries = make_branches(case)

    def differentiate(batch):
        def weigh(queries):
            output, lse = attend(cache, batch, queries, case)
            return (output * np.sin(np.arange(ROWS))[:, None, None]).sum() + lse.sum()

        return jax.grad(weigh)(queries)

    gradient = differentiate(batch)
    assert np.abs(gradient).max() > 0.01
    np.testing.assert_allclose(gradient, differentiate(without_plan(batch)), atol=1e-6)


@pytest.mark.one_end
def test_steps_without_a_plan():
    """If rows must not be combined, or columns are looped over together anyway."""
    case = CASES["plain"]
    cache, batch, _ = make_branches(case)
    assert batch.plan is not None
    sequences = batch.seq_ids
    assert jkv.append(cache, sequences[:2])[1].plan is None
    config = make_config(case)
    for changes in (dict(max_context_length=64), dict(sliding_window=16)):
        other = jkv.init(dataclasses.replace(config, **changes))
        assert jkv.append(other, sequences)[1].plan is None

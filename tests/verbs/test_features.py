"""One test per row of the table of features and faults of the earlier caches.

The rows and their numbers are those of `docs/features.md`: what two Rust caches had,
were asked for, or got wrong. `docs/features.md` names each of these tests.
"""

import ast
import dataclasses
import inspect
import pathlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    grow,
    opened,
    refusal_counts,
    small_cache,
    small_config,
    stored_tokens,
    table,
    with_storage_filled,
    without_refusals,
    write_tokens,
)

import jkv
from jkv import Status


def i32(*values):
    return jnp.array(values, jnp.int32)


def names(status):
    return [Status(code).name for code in np.asarray(status).tolist()]


def free_count(cache):
    return int(jkv.num_free_blocks(cache))


def with_metadata(cache, **changes):
    metadata = dataclasses.replace(cache.metadata, **changes)
    return dataclasses.replace(cache, metadata=metadata)


def operations_on(size, jaxpr):
    """Names of the primitives that read or make an array with a dimension `size`."""
    found = set()
    for equation in jaxpr.eqns:
        inner = [
            getattr(value, "jaxpr", value)
            for value in jax.tree.leaves(
                list(equation.params.values()),
                is_leaf=lambda value: hasattr(value, "eqns"),
            )
            if hasattr(value, "eqns")
        ]
        if inner:
            for sub in inner:
                found |= operations_on(size, sub)
            continue
        shapes = [
            variable.aval.shape
            for variable in [*equation.invars, *equation.outvars]
            if hasattr(variable.aval, "shape")
        ]
        if any(size in shape for shape in shapes):
            found.add(equation.primitive.name)
    return found


@pytest.mark.parametrize(
    "verb",
    [
        lambda cache: jkv.allocate(cache, i32(5, 3, 0)),
        lambda cache: jkv.append(cache, i32(0, 1, 2), 1),
        lambda cache: jkv.fork(cache, i32(0, 1, 2)),
        lambda cache: jkv.free(cache, i32(0, 1, 2)),
        lambda cache: jkv.truncate(cache, i32(0, 1, 2), 1),
    ],
    ids=["allocate", "append", "fork", "free", "truncate"],
)
def test_01_allocation_touches_single_ids_of_a_pool_of_any_size(verb):
    size = 4099  # no other dimension is this one
    cache = jkv.init(small_config(num_blocks=size), storage=False)
    touching = operations_on(size, jax.make_jaxpr(verb)(cache).jaxpr)
    assert touching, "the pool must appear somewhere"
    in_place = {"gather", "scatter", "scatter-add", "scatter_add"}
    assert touching <= in_place | {"dynamic_slice", "dynamic_update_slice"}


def test_01_free_blocks_are_first_in_first_out():
    cache = opened(4, 4, 4, num_blocks=4)
    cache, _ = jkv.free(cache, i32(1))
    cache, _ = jkv.free(cache, i32(0))
    cache, _ = jkv.free(cache, i32(2))
    cache, _ = jkv.allocate(cache, i32(14))
    assert table(cache, 3) == [3, 1, 0, 2]


def test_02_an_exhausted_pool_answers():
    cache = opened(4, num_blocks=1)
    assert free_count(cache) == 0
    assert jkv.can_allocate(cache, 1).tolist() == [False]
    for after, result in [
        jkv.allocate(cache, i32(1, 14, 4)),
        jkv.append(cache, i32(0, 0, 0)),
    ]:
        assert names(result.status)[0] == "OUT_OF_BLOCKS"
        assert without_refusals(after) == without_refusals(cache)
    cache, _ = jkv.free(cache, i32(0))
    assert free_count(cache) == 1


def test_03_no_block_is_handed_out_twice():
    cache = small_cache(num_blocks=11, max_context_length=20)
    rng = np.random.default_rng(3)
    for _ in range(60):
        counts = jnp.array(rng.integers(0, 12, 3), jnp.int32)
        cache, _ = jkv.allocate(cache, counts)
        cache, _ = jkv.free(cache, jnp.array(rng.integers(0, 4, 2), jnp.int32))
        taken = [block for row in range(4) for block in table(cache, row)]
        assert len(taken) == len(set(taken)) == 11 - free_count(cache)
        jkv.check(cache)


def test_04_several_blocks_are_all_or_nothing():
    cache, result = jkv.allocate(small_cache(num_blocks=3), i32(13))
    assert names(result.status) == ["OUT_OF_BLOCKS"] and free_count(cache) == 3
    cache, result = jkv.allocate(cache, i32(12))
    assert names(result.status) == ["OK"] and free_count(cache) == 0


def test_05_a_batch_pop_needs_no_contiguous_blocks():
    cache, _ = jkv.free(opened(4, 4, 4, 4, num_blocks=4), i32(2, 0))
    cache, _ = jkv.allocate(cache, i32(8))
    assert table(cache, 2) == [2, 0]


def test_06_nine_tokens_in_blocks_of_four_take_three():
    cache, taken = opened(0), []
    for _ in range(9):
        cache, _ = jkv.append(cache, i32(0))
        taken.append(8 - free_count(cache))
    assert taken == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_07_a_token_at_a_boundary_is_counted_once():
    cache = opened(4, num_blocks=1)
    for _ in range(3):
        cache, batch = jkv.append(cache, i32(0))
        assert names(batch.status) == ["OUT_OF_BLOCKS"]
        assert batch.context_lengths.tolist() == [4]
    assert int(cache.metadata.context_lengths[0]) == 4


def test_08_an_old_value_is_readable_from_other_threads():
    old = opened(6, 6)
    found = []

    def look():
        found.append([stored_tokens(old, 0), stored_tokens(old, 1)])

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
        new, _ = jkv.free(old, i32(0))
        new, result = jkv.allocate(new, i32(0))
        grow(new, int(result.seq_ids[0]), [7] * 9)
    for thread in threads:
        thread.join()
    assert found == [[list(range(6)), list(range(100, 106))]] * 3


def test_09_counts_are_recounted():
    cache = opened(6)
    wrong = cache.metadata.reference_counts.at[5].set(1)
    with pytest.raises(jkv.InvariantError):
        jkv.check(with_metadata(cache, reference_counts=wrong))


def test_10_block_zero_is_a_block_like_any_other():
    cache = opened(0, 4)
    assert table(cache, 1) == [0]
    assert jkv.block_ids(cache, 0).tolist() == [8] * 4
    cache, _ = jkv.fork(cache, i32(1))
    cache, _ = jkv.free(cache, i32(1))
    assert stored_tokens(cache, 2) == [100, 101, 102, 103]
    cache, _ = jkv.free(cache, i32(2))
    assert free_count(cache) == 8


def test_11_sizes_are_python_ints_and_do_not_overflow():
    config = small_config(num_layers=80, num_kv_heads=8, head_dim=128, num_blocks=2**20)
    pools = 2 * 80 * 2**20 * 8 * 4 * 128 * 4
    assert pools > 2**40
    assert 0 < config.bytes - pools < 2**24
    with pytest.raises(ValueError, match="num_blocks"):
        small_config(num_blocks=2**31)
    with pytest.raises(ValueError, match="max_context_length"):
        small_config(max_context_length=2**31)
    with pytest.raises(ValueError, match="max_sequences"):
        small_config(max_sequences=2**20, max_context_length=2**20)


@pytest.mark.parametrize(
    "field",
    [
        "num_layers",
        "num_kv_heads",
        "head_dim",
        "value_head_dim",
        "num_blocks",
        "block_size",
        "max_sequences",
        "max_context_length",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_12_sizes_that_cannot_work_are_rejected(field, value):
    with pytest.raises(ValueError, match=field):
        small_config(**{field: value})


def test_13_blocks_of_a_sequence_and_block_of_a_position():
    cache = opened(3, 9)
    assert jkv.block_ids(cache, 1).tolist() == [1, 2, 3, 8]
    found = jkv.slots(cache, i32(1, 1, 1, 0), i32(0, 4, 8, 2))
    assert found.block_ids.tolist() == [1, 2, 3, 0]
    assert found.offsets.tolist() == [0, 0, 0, 2]
    cache = grow(cache, 1, range(109, 113))  # a block is appended to the table
    assert jkv.block_ids(cache, 1).tolist() == [1, 2, 3, 4]


def test_14_positions_become_slots_only_through_the_table():
    cache, _ = jkv.free(opened(8, 4), i32(0))
    cache, result = jkv.allocate(cache, i32(0))
    seq_id = int(result.seq_ids[0])
    cache = grow(cache, seq_id, range(14))
    cache, result = jkv.allocate(cache, i32(0))
    cache = grow(cache, int(result.seq_ids[0]), range(50, 62))
    seq_id = int(result.seq_ids[0])
    assert table(cache, seq_id) == [7, 1, 0]  # logical 0, 1, 2
    found = jkv.slots(cache, i32(seq_id, seq_id, seq_id), i32(0, 5, 10))
    assert found.block_ids.tolist() == [7, 1, 0]
    for block, offset, number in zip(*found, (50, 55, 60), strict=True):
        assert float(jkv.read_slot(cache, 0, block, offset)[0][0, 0]) == number


def test_15_sequences_are_isolated_after_churn():
    cache, live, number = small_cache(num_blocks=12), {}, 0
    rng = np.random.default_rng(15)
    for _ in range(40):
        if len(live) == 4 or (live and rng.random() < 0.3):
            seq_id = int(rng.choice(list(live)))
            cache, _ = jkv.free(cache, i32(seq_id))
            del live[seq_id]
        else:
            cache, result = jkv.allocate(cache, i32(0))
            live[int(result.seq_ids[0])] = []
        for seq_id in live:
            contents = list(range(number, number + int(rng.integers(3))))
            if len(live[seq_id] + contents) <= 9:
                cache = grow(cache, seq_id, contents)
                live[seq_id] += contents
                number += len(contents)
        for seq_id, contents in live.items():
            assert stored_tokens(cache, seq_id) == contents
    jkv.check(cache)


def test_16_write_and_read_one_slot():
    cache = opened(6, num_layers=2)
    cache, batch = jkv.append(cache, i32(0))
    cache = write_tokens(cache, batch, [9.5])
    for layer in range(2):
        key, value = jkv.read_slot(cache, layer, batch.block_ids[0], batch.offsets[0])
        assert key.shape == value.shape == (1, 2)
        assert key.tolist() == [[9.5, 9.5]] and value.tolist() == [[-9.5, -9.5]]


def test_17_what_was_never_written_is_never_read():
    """The pool is NaN, also in the rest of the last block and in reserved blocks."""
    cache, _ = jkv.allocate(small_cache(), i32(14, 14))
    cache = grow(cache, 0, range(5))
    cache, batch = jkv.append(cache, i32(0, 1))
    cache = write_tokens(cache, batch, [5, 6])
    found = jkv.attend(cache, 0, batch, jnp.ones((2, 2, 2), jnp.float32))
    assert np.isfinite(np.asarray(found)).all() and np.asarray(found).all()
    assert stored_tokens(cache, 0) == list(range(6))
    # After reuse the slots hold what another sequence left: not seen either.
    cache, _ = jkv.free(with_storage_filled(cache, 1e30), i32(0, 1))
    cache, _ = jkv.allocate(cache, i32(0))
    cache = grow(cache, 2, [1.0, 2.0])
    cache, batch = jkv.append(cache, i32(2))
    cache = write_tokens(cache, batch, [3.0])
    found = np.asarray(jkv.attend(cache, 0, batch, jnp.ones((1, 2, 2), jnp.float32)))
    assert (found <= -1.0).all() and (found >= -3.0).all()


def test_18_metadata_without_storage():
    bare = jkv.init(small_config(), storage=False)
    assert bare.keys.size == bare.values.size == 0
    full = jkv.init(small_config())
    for _ in range(3):
        bare, one = jkv.allocate(bare, i32(5))
        full, two = jkv.allocate(full, i32(5))
        bare, _ = jkv.append(bare, one.seq_ids, 7, capacity=7)
        full, _ = jkv.append(full, two.seq_ids, 7, capacity=7)
        bare, _ = jkv.fork(bare, one.seq_ids)
        full, _ = jkv.fork(full, two.seq_ids)
    jkv.check(bare)
    for one, two in zip(
        jax.tree.leaves(bare.metadata), jax.tree.leaves(full.metadata), strict=True
    ):
        np.testing.assert_array_equal(one, two)
    cache, batch = jkv.append(bare, i32(0))
    rows = jnp.ones((1, 1, 2), jnp.float32)
    with pytest.raises(ValueError, match="storage"):
        jkv.write(cache, 0, batch, rows, rows)
    with pytest.raises(ValueError, match="storage"):
        jkv.read(cache, 0, 0)


def wrong_values(array):
    """Each entry of an array, changed in ways that no fault would hide."""
    flat = np.asarray(array).reshape(-1)
    for index in range(flat.size):
        if flat.dtype == np.bool_:
            values = [not flat[index]]
        else:
            values = [flat[index] + 1, flat[index] - 1, -7, 2**30]
        for value in values:
            if value != flat[index]:
                changed = flat.copy()
                changed[index] = value
                yield index, value, jnp.asarray(changed.reshape(np.shape(array)))


@pytest.mark.parametrize(
    "leaf",
    [
        "num_mapped_blocks",
        "is_open",
        "reference_counts",
        "free_blocks.bounds",
        "free_sequences.bounds",
    ],
)
def test_19_every_leaf_has_an_invariant(leaf):
    """Any wrong entry of these is found, whichever entry it is."""
    cache, _ = jkv.fork(opened(6, 8), i32(1))
    cache, _ = jkv.free(cache, i32(0))
    jkv.check(cache)
    name, _, part = leaf.partition(".")
    whole = getattr(cache.metadata, name)
    for index, value, changed in wrong_values(getattr(whole, part) if part else whole):
        if part == "bounds" and index == 0:
            continue  # another head may name the same ids
        if part == "bounds" and index == 3 and 0 <= value <= int(whole.count):
            continue  # the ring may have been that short once
        wrong = dataclasses.replace(whole, **{part: changed}) if part else changed
        try:
            jkv.check(with_metadata(cache, **{name: wrong}))
        except jkv.InvariantError:
            continue
        raise AssertionError(f"{leaf}[{index}] = {value} was not noticed")


def test_19_wrong_tables_lengths_and_rings_are_found():
    """Of these, entries past the end mean nothing; the live ones are guarded."""
    cache, _ = jkv.fork(opened(6, 8), i32(1))
    cache, _ = jkv.free(cache, i32(0))
    meta = cache.metadata
    head = int(meta.free_blocks.head)
    ring = meta.free_blocks.ids
    wrong = [
        dict(block_tables=meta.block_tables.at[1, 0].set(7)),  # a free block
        dict(block_tables=meta.block_tables.at[1, 1].set(2)),  # named twice
        dict(block_tables=meta.block_tables.at[1, 0].set(8)),  # not mapped
        dict(block_tables=meta.block_tables.at[1, 0].set(-1)),
        dict(context_lengths=meta.context_lengths.at[1].set(9)),  # no block for it
        dict(context_lengths=meta.context_lengths.at[1].set(-1)),
        dict(context_lengths=meta.context_lengths.at[0].set(1)),  # dead, not empty
        dict(context_lengths=meta.context_lengths.at[1].set(7)),  # a shared tail
        dict(
            free_blocks=dataclasses.replace(
                meta.free_blocks, ids=ring.at[head].set(ring[(head + 1) % 8])
            )
        ),
        dict(
            free_blocks=dataclasses.replace(meta.free_blocks, ids=ring.at[head].set(2))
        ),
        dict(
            free_sequences=dataclasses.replace(
                meta.free_sequences, ids=jnp.zeros_like(meta.free_sequences.ids)
            )
        ),
    ]
    for changes in wrong:
        with pytest.raises(jkv.InvariantError):
            jkv.check(with_metadata(cache, **changes))


def test_20_recorded_tokens_agree_with_the_length():
    cache, _ = jkv.allocate(small_cache(record_tokens=True), i32(0, 0))

    def record(cache, seq_id, *tokens):
        return jkv.append(
            cache, i32(seq_id), len(tokens), capacity=len(tokens), tokens=i32(*tokens)
        )[0]

    def recorded(cache, seq_id):
        tokens = jkv.tokens(cache, seq_id).tolist()
        length = int(cache.metadata.context_lengths[seq_id])
        assert tokens[length:] == [-1] * (14 - length)
        return tokens[:length]

    cache = record(cache, 0, 5, 6, 7, 8, 9, 10)
    cache, _ = jkv.fork(cache, i32(0))
    cache = record(cache, 2, 11)
    assert recorded(cache, 2) == [5, 6, 7, 8, 9, 10, 11]
    cache, _ = jkv.truncate(cache, i32(2), i32(2))
    cache = record(cache, 2, 20, 21, 22)
    assert recorded(cache, 2) == [5, 6, 20, 21, 22]
    assert recorded(cache, 0) == [5, 6, 7, 8, 9, 10]
    cache, _ = jkv.reorder(cache, i32(0, 1), i32(2, 0))
    assert recorded(cache, 0) == [5, 6, 20, 21, 22]
    assert recorded(cache, 1) == [5, 6, 7, 8, 9, 10]
    cache, batch = jkv.append(cache, i32(0), 10, capacity=10, tokens=i32(*range(10)))
    assert names(batch.status) == ["CONTEXT_FULL"]
    assert recorded(cache, 0) == [5, 6, 20, 21, 22]
    cache, _ = jkv.free(cache, i32(0))
    assert recorded(cache, 0) == []
    jkv.check(cache)


def test_21_ids_out_of_range_have_bounds():
    cache = opened(6)
    for far in (8, 9, 2**31 - 1, -1, -8, -(2**31)):
        for block, offset in ((far, 0), (0, far)):
            key, value = jkv.read_slot(cache, 0, block, offset)
            assert not np.asarray(key).any() and not np.asarray(value).any()
    for block in (8, 9, 2**31 - 1, -1, -8, -(2**31)):
        info = jkv.block_info(cache, block)
        assert int(info.reference_count) == 0 and not bool(info.is_free)
    stale = cache.metadata.block_tables.at[0, 0].set(7)
    with pytest.raises(jkv.InvariantError):
        jkv.check(with_metadata(cache, block_tables=stale))


def test_22_every_parameter_is_used():
    for path in sorted(pathlib.Path(jkv.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or is_declaration(node):
                continue
            arguments = node.args
            parameters = [
                argument.arg
                for argument in [
                    *arguments.posonlyargs,
                    *arguments.args,
                    *arguments.kwonlyargs,
                ]
            ]
            used = {
                inner.id
                for statement in node.body
                for inner in ast.walk(statement)
                if isinstance(inner, ast.Name)
            }
            for parameter in parameters:
                if parameter in ("self", "cls") or parameter.startswith("_"):
                    continue
                assert parameter in used, (path.name, node.name, parameter)


def is_declaration(node):
    """A body of only a docstring or an ellipsis: a protocol or an overload."""
    return all(
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        for statement in node.body
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_23_the_dtype_can_be_chosen(dtype):
    cache = opened(6, dtype=dtype)
    assert cache.dtype == dtype
    keys, values, _ = jkv.read(cache, 0, 0)
    assert keys.dtype == values.dtype == dtype
    assert stored_tokens(cache, 0) == list(range(6))
    cache, _ = jkv.fork(cache, i32(0))
    cache, _ = jkv.truncate(cache, i32(1), i32(2))
    assert stored_tokens(cache, 1) == [0, 1]


def test_23_other_dtypes_say_what_there_is():
    for dtype in (jnp.int32, jnp.float64, jnp.bool_, "complex64"):
        with pytest.raises(ValueError, match="bfloat16"):
            small_config(dtype=dtype)


def test_24_capacity_in_tokens_by_hand():
    # 8 blocks of 4 tokens: 32 tokens, in sequences of 14, 14 and 4 only 8 blocks.
    assert small_config().capacity_tokens == 32
    cache = opened(12, 12, 8)
    assert free_count(cache) == 0
    assert sum(len(stored_tokens(cache, row)) for row in range(3)) == 32
    _, batch = jkv.append(cache, i32(0, 1, 2))
    assert names(batch.status) == ["OUT_OF_BLOCKS"] * 3


def test_24_bytes_by_hand_and_exact():
    # Keys: 1 layer, 8 blocks, 1 head, 4 tokens, 2 floats. Values: 3 floats.
    keys, values = 8 * 4 * 2 * 4, 8 * 4 * 3 * 4
    # Tables 4x4, six rows of 4 (one bool), counts and ring of 8, ring of 4, four
    # ints per ring, two words for each of 16 counters.
    metadata = 64 + 5 * 16 + 4 + 32 + 32 + 16 + 32 + 128
    config = small_config(value_head_dim=3)
    assert config.bytes == keys + values + metadata
    for changes in (
        dict(),
        dict(value_head_dim=3),
        dict(dtype=jnp.bfloat16, num_layers=3, num_kv_heads=2),
        dict(dtype=jnp.float16, block_size=3, max_context_length=7),
        dict(record_tokens=True),
    ):
        config = small_config(**changes)
        leaves = jax.tree.leaves(jkv.init(config))
        assert config.bytes == sum(leaf.nbytes for leaf in leaves)
        assert type(config.bytes) is int


def test_24_sizes_from_a_budget_and_from_a_context_length():
    sizes = dict(num_layers=3, num_kv_heads=2, head_dim=8, max_context_length=30)
    for budget in (50_000, 50_001, 1_000_000):
        config = jkv.CacheConfig.for_memory(budget, max_sequences=5, **sizes)
        assert config.bytes <= budget
        more = dataclasses.replace(config, num_blocks=config.num_blocks + 1)
        assert more.bytes > budget
    del sizes["max_context_length"]
    config = jkv.CacheConfig.for_context_length(
        30, max_sequences=5, block_size=4, **sizes
    )
    assert config.num_blocks == 5 * 8
    for preset in ("small", "medium", "large"):
        config = getattr(jkv.CacheConfig, preset)(
            max_context_length=30, max_sequences=5, **sizes
        )
        assert config.num_blocks > 0


def test_25_accessors():
    config = small_config(
        num_layers=3, num_kv_heads=2, value_head_dim=5, max_sequences=7
    )
    cache = jkv.init(config, device=jax.devices("cpu")[0])
    assert (cache.num_layers, cache.num_kv_heads) == (3, 2)
    assert (cache.head_dim, cache.value_head_dim) == (2, 5)
    assert (cache.num_blocks, cache.block_size) == (8, 4)
    assert (cache.max_sequences, cache.max_blocks_per_sequence) == (7, 4)
    assert cache.max_context_length == 14
    assert cache.dtype == jnp.float32
    assert free_count(cache) == 8
    devices = {jax.devices("cpu")[0]}
    assert all(leaf.devices() == devices for leaf in jax.tree.leaves(cache))
    lines = repr(cache).splitlines()
    assert len(lines) < 25 and max(map(len, lines)) < 100


def test_26_sharing_is_counted_and_writers_own_their_tail():
    cache, _ = jkv.fork(opened(6), i32(0, 0))
    counts = cache.metadata.reference_counts.tolist()
    assert counts == [3, 1, 1, 1, 0, 0, 0, 0]
    cache, batch = jkv.append(cache, i32(0, 1, 2))
    assert len(set(batch.block_ids.tolist())) == 3
    cache = write_tokens(cache, batch, [70, 71, 72])
    assert [stored_tokens(cache, row)[-1] for row in range(3)] == [70, 71, 72]


def test_27_reference_counts_cannot_underflow():
    cache, _ = jkv.fork(opened(8), i32(0))
    for _ in range(4):
        cache, _ = jkv.free(cache, i32(0, 1, 0, 1))
        assert int(cache.metadata.reference_counts.min()) == 0
        jkv.check(cache)
    assert free_count(cache) == 8


def test_28_counts_equal_a_recount_of_rows():
    cache, _ = jkv.fork(opened(8, 5), i32(0, 0))
    cache, _ = jkv.truncate(cache, i32(2), i32(3))
    cache, _ = jkv.free(cache, i32(0))
    counts = [0] * 8
    for row in range(4):
        for block in table(cache, row):
            counts[block] += 1
    assert cache.metadata.reference_counts.tolist() == counts


def test_29_ten_thousand_cycles_end_with_the_full_pool():
    def cycle(i, cache):
        cache, result = jkv.allocate(cache, jnp.stack([i % 9, i % 5]))
        cache, _ = jkv.append(cache, result.seq_ids, i % 8, capacity=16)
        cache, children = jkv.fork(cache, result.seq_ids)
        cache, _ = jkv.truncate(cache, children.seq_ids, i % 3)
        cache, _ = jkv.free(cache, result.seq_ids)
        return jkv.free(cache, children.seq_ids)[0]

    cache = jkv.init(small_config(), storage=False)
    cache = jax.jit(lambda c: jax.lax.fori_loop(0, 10_000, cycle, c))(cache)
    assert free_count(cache) == 8
    assert not cache.metadata.is_open.any()
    assert not cache.metadata.reference_counts.any()
    # Some truncations asked for more tokens than there were; nothing else went wrong.
    assert set(np.flatnonzero(refusal_counts(cache))) == {Status.INVALID_ARGUMENT}
    jkv.check(cache)


def test_30_a_shared_block_is_freed_with_its_last_reference():
    cache, _ = jkv.fork(opened(8, num_blocks=4), i32(0, 0))
    for seq_id, blocks_free in ((0, 2), (2, 2), (1, 4)):
        assert stored_tokens(cache, 1) == list(range(8))
        cache, _ = jkv.free(cache, i32(seq_id))
        assert free_count(cache) == blocks_free
        jkv.check(cache)


@pytest.mark.parametrize("seq_ids", [(0,), (4,), (-2,), (2**31 - 1,), (3,), (0, 0)])
def test_31_a_second_free_is_refused_and_changes_nothing(seq_ids):
    cache, _ = jkv.free(opened(6, 6), i32(0))
    after, status = jkv.free(cache, i32(*seq_ids))
    assert names(status) == ["INVALID_SEQUENCE"] * len(seq_ids)
    assert without_refusals(after) == without_refusals(cache)


def test_32_sequences_are_freed_in_the_loop_that_ends_them():
    limits = i32(3, 9, 6)

    def step(carry):
        cache, seq_ids = carry
        cache, batch = jkv.append(cache, seq_ids)
        done = (batch.context_lengths >= limits) & (seq_ids >= 0)
        cache, _ = jkv.free(cache, jnp.where(done, seq_ids, jkv.NO_SEQUENCE))
        return cache, jnp.where(done, jkv.NO_SEQUENCE, seq_ids)

    cache, _ = jax.lax.while_loop(
        lambda carry: (carry[1] >= 0).any(), step, (opened(0, 0, 0), i32(0, 1, 2))
    )
    assert free_count(cache) == 8 and not cache.metadata.is_open.any()
    assert refusal_counts(cache) == [0] * 7
    # Cleaning up again is harmless.
    again, _ = jkv.free(cache, i32(0, 1, 2))
    assert without_refusals(again) == without_refusals(cache)


def test_34_created_last_used_and_number_of_uses():
    cache = opened(6, 3)
    meta = cache.metadata
    assert meta.created[:2].tolist() == [1, 3]
    assert meta.last_used[:2].tolist() == [2, 4]
    assert meta.num_uses[:2].tolist() == [1, 1]
    cache, status = jkv.touch(cache, i32(0, 0, 3, -1))
    assert names(status) == ["OK", "INVALID_SEQUENCE", "INVALID_SEQUENCE", "OK"]
    assert int(jkv.clock(cache)) == 5
    assert cache.metadata.last_used[:2].tolist() == [5, 4]
    assert cache.metadata.num_uses[:2].tolist() == [2, 1]
    # A parent is used by its fork; the child is new.
    cache, _ = jkv.fork(cache, i32(1))
    assert cache.metadata.last_used[:3].tolist() == [5, 6, 6]
    assert cache.metadata.num_uses[:3].tolist() == [2, 2, 0]
    # Looking, writing and being refused use nothing.
    before = cache.metadata.last_used.tolist()
    cache, _ = jkv.append(cache, i32(0), -1)
    jkv.read(cache, 0, 0)
    assert cache.metadata.last_used.tolist() == before


def test_35_the_least_recently_used_go_until_enough_is_free():
    cache = opened(8, 4, 8, 4)  # 2 + 1 + 2 + 1 blocks of 8
    cache, _ = jkv.touch(cache, i32(0))
    assert jkv.least_recently_used(cache, 4).tolist() == [1, 2, 3, 0]
    order = jkv.least_recently_used(cache, 3, exclude=[2, -1, 99])
    assert order.tolist() == [1, 3, 0]
    after, evicted = jkv.evict(cache, 4, protect=i32(2))
    assert evicted.tolist() == [1, 3, -1, -1] and free_count(after) == 4
    jkv.check(after)
    # Nobody goes if there is enough; nobody is left if there is too little.
    assert jkv.evict(cache, 2)[1].tolist() == [-1] * 4
    after, evicted = jkv.evict(cache, 99, protect=0)
    assert evicted.tolist() == [1, 2, 3, -1] and free_count(after) == 6


def test_35_refused_evict_retry():
    cache = opened(8, 8, 8, max_sequences=8)
    cache, refused = jkv.allocate(cache, i32(12))
    assert names(refused.status) == ["OUT_OF_BLOCKS"]
    cache, evicted = jkv.evict(cache, 3)
    assert evicted[:2].tolist() == [0, -1]
    cache, result = jkv.allocate(cache, i32(12))
    assert names(result.status) == ["OK"]
    assert stored_tokens(cache, 1) == list(range(100, 108))
    jkv.check(cache)


def test_35_shared_blocks_come_free_with_the_last_owner():
    cache, _ = jkv.fork(opened(8, num_blocks=4), i32(0))
    after, evicted = jkv.evict(cache, 3)
    assert evicted.tolist() == [0, 1, -1, -1] and free_count(after) == 4


def test_35_sequences_of_an_age_are_evicted():
    cache = opened(8, 4, 4)
    for _ in range(3):
        cache, _ = jkv.touch(cache, i32(1))
    ages = (jkv.clock(cache) - cache.metadata.last_used)[:3].tolist()
    assert ages == [7, 0, 3]
    assert jkv.evict_older_than(cache, 7)[1].tolist() == [-1] * 4
    after, evicted = jkv.evict_older_than(cache, 2)
    assert evicted.tolist() == [0, 2, -1, -1] and free_count(after) == 7
    after, evicted = jkv.evict_older_than(cache, 2, protect=0)
    assert evicted.tolist() == [2, -1, -1, -1]
    for age in (-1, 2**32):
        with pytest.raises(ValueError, match="age must be"):
            jkv.evict_older_than(cache, age)


def test_36_cached_blocks_are_evicted_oldest_first_live_ones_never():
    cache = small_cache(prefix_caching=True)
    for seq_id in range(2):
        tokens = jnp.arange(8) + 10 * seq_id
        cache, _ = jkv.allocate(cache, 0)
        cache, batch = jkv.append(cache, seq_id, 8, capacity=8, tokens=tokens)
        cache = write_tokens(cache, batch, tokens)
    cache, _ = jkv.free(cache, 1)
    cache = jkv.evict_cached(cache, 1)
    cached = [bool(jkv.block_info(cache, block).is_cached) for block in range(4)]
    assert cached == [False, False, True, False]
    cache = jkv.evict_cached(cache, 99)
    assert stored_tokens(cache, 0) == list(range(8))
    assert jkv.match(cache, jnp.arange(9)[None]).tolist() == [8]  # live, still found
    assert jkv.match(cache, jnp.arange(10, 19)[None]).tolist() == [0]


def test_37_a_block_is_free_cached_or_in_use():
    cache, _ = jkv.fork(opened(8), i32(0))
    info = [jkv.block_info(cache, block) for block in range(8)]
    assert [int(each.reference_count) for each in info] == [2, 2] + [0] * 6
    assert [bool(each.is_free) for each in info] == [False] * 2 + [True] * 6
    assert not any(bool(each.is_cached) for each in info)
    cache, _ = jkv.free(cache, i32(0, 1))
    assert all(bool(jkv.block_info(cache, block).is_free) for block in range(8))


def test_45_distinct_causes_have_distinct_errors():
    cases = {
        jkv.OutOfBlocks: jkv.append(opened(4, num_blocks=1), i32(0)),
        jkv.OutOfSequences: jkv.fork(opened(4, max_sequences=1), i32(0)),
        jkv.ContextFull: jkv.append(opened(14), i32(0)),
        jkv.BatchFull: jkv.append(opened(4), i32(0), 2),
        jkv.InvalidSequence: jkv.append(opened(4), i32(1)),
        jkv.InvalidArgument: jkv.append(opened(4), i32(0), -1),
    }
    for error, (_, result) in cases.items():
        with pytest.raises(jkv.CacheError) as caught:
            jkv.raise_for_status(result.status)
        assert type(caught.value) is error
    with pytest.raises(ValueError):
        small_config(num_blocks=0)


def test_46_every_public_function_has_an_example():
    for name in jkv.__all__:
        item = getattr(jkv, name)
        if inspect.isfunction(item):
            assert ">>>" in inspect.getdoc(item), name


def test_47_random_operations_against_a_model():
    """A short game; the long ones are in test_random_operations.py."""
    from test_random_operations import SHAPES, Game, make_verbs

    Game(SHAPES["roomy"], make_verbs("eager"), seed=47).play(num_operations=60)


def test_48_everything_runs_on_a_cpu():
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        cache = opened(6)
        cache, batch = jkv.append(cache, i32(0))
        cache = write_tokens(cache, batch, [6])
        found = jkv.attend(cache, 0, batch, jnp.ones((1, 2, 2), jnp.float32))
    assert found.devices() == {cpu}

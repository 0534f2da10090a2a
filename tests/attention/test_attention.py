"""Attention on plain arrays, compared with the reference and a plain loop."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention import formats
from support.attention.attention_workloads import (
    WORKLOADS,
    Workload,
    decode,
    make_operands,
    shrink,
)
from support.attention.plain_attention import attend_loop
from support.attention.served_shapes import Shape, fit
from support.compiled_hlo import ALL_PASSES
from support.jax_versions import dealt, few
from support.tolerances import assert_close, is_close

from jkv.attention import paged_attention
from jkv.attention.backend import Requests, make_requests
from jkv.attention.xla.decode import list_work

NUM_ROWS, NUM_BLOCKS, MAX_BLOCKS = 17, 30, 9
LAYER = 1
# A window that masks nothing: all windows of one shape share a program.
WIDE = np.int32(2**30)
# None selects "xla" for calls as small as these.
IMPLEMENTATIONS = ["reference", "xla", None]

# (query length, context length) of each request; all share one trace.
BATCHES = {
    "decode": [(1, 26), (1, 1), (1, 3), (1, 9)],
    "prefill": [(5, 5), (1, 1), (9, 9), (2, 2)],
    "chunked prefill": [(7, 25), (5, 9), (2, 3), (3, 20)],
    "mixed": [(1, 25), (8, 11), (0, 6), (1, 16)],
    "idle": [(0, 4), (0, 0), (0, 9), (1, 2)],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes and options of a compiled call."""

    kv_heads: int = 2
    group: int = 1
    head_dim: int = 16
    value_dim: int = 16
    block_size: int = 4
    options: tuple[tuple[str, float], ...] = ()
    has_sinks: bool = False

    def workload(self, batch: str) -> Workload:
        query_lengths, context_lengths = zip(*BATCHES[batch], strict=True)
        return Workload(
            name=batch,
            query_lengths=query_lengths,
            context_lengths=context_lengths,
            num_heads=self.kv_heads * self.group,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_dim,
            block_size=self.block_size,
            num_layers=2,
        )

    def sinks(self) -> np.ndarray | None:
        if not self.has_sinks:
            return None
        return np.linspace(-1.0, 2.0, self.kv_heads * self.group, dtype=np.float32)


def case(**fields) -> Case:
    options = tuple(fields.pop("options", {}).items())
    return Case(options=options, **fields)


CASES = {
    "one kv head per query head": case(head_dim=64, value_dim=64, block_size=16),
    "groups of 2, window": case(group=2, options={"window": 5}),
    "groups of 3, soft cap": case(group=3, options={"soft_cap": 1.5}, head_dim=80),
    "groups of 4, sinks": case(group=4, has_sinks=True, value_dim=24),
    "groups of 5, scale": case(group=5, options={"scale": 0.7}, head_dim=96),
    "groups of 6, window of 1": case(group=6, options={"window": 1}, block_size=3),
    "groups of 7, everything": case(
        group=7,
        block_size=3,
        has_sinks=True,
        options={"window": 7, "soft_cap": 2.0, "scale": 0.3},
    ),
    "multi-query, block size 5": case(kv_heads=1, group=8, block_size=5, value_dim=8),
}


def arguments(operands, num_rows=NUM_ROWS, dtype="float32"):
    """Return the arguments of `paged_attention`, padded to `num_rows` rows."""
    queries = operands.queries[LAYER]
    padded = np.full((num_rows, *queries.shape[1:]), 3.0, np.float32)
    padded[: len(queries)] = queries
    floats = padded, operands.key_pool, operands.value_pool
    arrays = [*(array.astype(dtype) for array in floats), np.int32(LAYER)]
    arrays += [operands.block_tables, np.arange(len(operands.keys), dtype=np.int32)]
    arrays += operands[4:7]
    return [np.asarray(array) for array in arrays]


# Kernel shapes: of `small_operands`, and of 8-bit storage.
FLOATS = Shape()
SMALL, BYTES = fit(FLOATS), fit(Shape(keys="int8", values="int8"))
HALF_BYTES = fit(Shape(queries="float16", keys="int8", values="int8"))


def small_operands(batch="mixed", seed=0, shape=FLOATS, **fields):
    """Create the operands of a workload in the dims of a shape, with finite dtypes."""
    dims = {"head_dim": shape.head_dim, "value_dim": shape.value_dim}
    operands = make_operands(
        case(**dims | fields).workload(batch),
        seed,
        num_blocks=NUM_BLOCKS,
        max_blocks=MAX_BLOCKS,
    )
    names = "queries", "key_pool", "value_pool", "keys", "values"
    rounded = jax.tree.map(
        lambda array: array.astype(shape.queries).astype(np.float32),
        {name: getattr(operands, name) for name in names},
    )
    return operands._replace(**rounded)


@pytest.mark.parametrize("name", dealt(CASES, turn=5, share=8))
@pytest.mark.parametrize("implementation", few(IMPLEMENTATIONS, "reference", None))
def test_equals_the_plain_loop(name, implementation):
    """Decode, prefill, mixed and idle batches share one trace."""
    this = CASES[name]
    options, sinks = dict(this.options), this.sinks()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def attend(*positional):
        return paged_attention(
            *positional,
            sinks=sinks,
            return_lse=True,
            implementation=implementation,
            **options,
        )

    for seed, batch in enumerate(BATCHES):
        operands = make_operands(
            this.workload(batch), seed, num_blocks=NUM_BLOCKS, max_blocks=MAX_BLOCKS
        )
        positional = arguments(operands)
        expected, logs = attend_loop(operands, LAYER, sinks=sinks, **options)
        used = len(expected)
        output, lse = jax.device_get(attend(*positional))
        assert_close(output[:used], expected)
        assert_close(lse[:used], logs)
        assert not output[used:].any() and np.isneginf(lse[used:]).all()
        again, _ = attend(*positional)
        np.testing.assert_array_equal(again, output)

        # The tolerance is smaller than the effect of these mistakes.
        if batch == "decode":
            shifted, permuted = list(positional), list(positional)
            shifted[8] = np.maximum(positional[8] - 1, 1)
            assert not is_close(attend(*shifted)[0][0], expected[0])
            permuted[4] = np.roll(positional[4], 1, axis=0)
            assert not is_close(attend(*permuted)[0][1], expected[1])
            assert not is_close(np.zeros_like(output[:used]), expected)


@pytest.mark.parametrize("name", ["decode-one-long-grouped", "mixed"])
@pytest.mark.one_end
def test_shrunken_workloads_equal_the_plain_loop(name):
    """The benchmarks' batches in their proportions."""
    (workload,) = (shrink(each) for each in WORKLOADS if each.name == name)
    operands = make_operands(workload)
    positional = arguments(operands, workload.num_rows)
    output = paged_attention(*positional, implementation="xla")
    expected, _ = attend_loop(operands, LAYER)
    assert_close(output, expected)
    assert not is_close(jnp.roll(output, 1, axis=0), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.one_end
def test_any_block_order_is_bit_identical(implementation):
    operands = small_operands()
    positional = arguments(operands)
    order = np.random.default_rng(1).permutation(NUM_BLOCKS)
    moved = list(positional)
    moved[1], moved[2] = positional[1][:, order], positional[2][:, order]
    place = np.argsort(order).astype(np.int32)  # new id of a block
    tables = operands.block_tables
    inside = (tables >= 0) & (tables < NUM_BLOCKS)
    moved[4] = np.where(inside, place[np.clip(tables, 0, NUM_BLOCKS - 1)], tables)
    attend = functools.partial(
        paged_attention, window=WIDE, implementation=implementation
    )
    np.testing.assert_array_equal(attend(*moved), attend(*positional))


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "pallas"])
@pytest.mark.one_end
def test_nan_outside_the_window_has_no_effect(implementation):
    """Also in the first visible block, in slots before the window."""
    window = 6
    operands = small_operands("decode", shape=SMALL)
    expected, _ = attend_loop(operands, LAYER, window=window)
    for request, context in enumerate(operands.context_lengths):
        for position in range(max(0, context - window)):
            block = operands.block_tables[request, position // 4]
            operands.key_pool[:, block, :, position % 4] = np.nan
            operands.value_pool[:, block, :, position % 4] = np.nan
    output = paged_attention(
        *arguments(operands, dtype=SMALL.queries),
        window=window,
        implementation=implementation,
    )
    assert_close(output[: len(expected)], expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.one_end
def test_padded_rows_and_shuffled_requests(implementation):
    """Padded [B, Q] rows, shuffled requests, ids and starts out of range."""
    operands = small_operands("chunked prefill")
    attend = functools.partial(paged_attention, implementation=implementation)
    packed = arguments(operands)
    expected, _ = attend_loop(operands, LAYER)
    starts, lengths = operands.query_starts, operands.query_lengths

    # Shuffled requests, each with 8 rows of its own, among padding.
    order, width = [2, 0, 3, 1], 8
    rows = np.full((7 * width, *operands.queries.shape[2:]), 5.0, np.float32)
    spread, slots = [], {0: 0, 2: 1, 3: 2, 6: 3}
    for place, which in slots.items():
        request = order[which]
        mine = slice(starts[request], starts[request] + lengths[request])
        rows[place * width : place * width + lengths[request]] = operands.queries[
            LAYER, mine
        ]
        spread.append((place, request, mine))

    def to_slots(array, filler):
        filled = np.full(7, filler, np.int32)
        for place, which in slots.items():
            filled[place] = np.asarray(array)[order[which]]
        return filled

    seq_ids = to_slots(np.arange(4), -1)
    seq_ids[[1, 4]] = 4, 2**31 - 1
    query_starts = np.arange(7, dtype=np.int32) * width
    query_starts[[5, 4]] = 7 * width, 2**31 - 1
    output = attend(
        rows,
        *packed[1:5],
        seq_ids,
        query_starts,
        to_slots(lengths, width),
        to_slots(operands.context_lengths, 20),
    )
    found = np.zeros(7 * width, bool)
    for place, request, mine in spread:
        there = slice(place * width, place * width + lengths[request])
        found[there] = True
        assert_close(output[there], expected[mine])
    assert not np.asarray(output)[~found].any()


@pytest.mark.parametrize("implementation", few(IMPLEMENTATIONS, None))
def test_calls_without_rows_requests_or_visible_tokens(implementation):
    """No rows, no requests, and a traced window that masks everything."""
    operands = small_operands()
    positional = arguments(operands)
    empty = paged_attention(positional[0][:0], *positional[1:])
    assert empty.shape == (0, 2, 16)
    none = [array[:0] for array in positional[5:]]
    assert not paged_attention(*positional[:5], *none).any()
    output, lse = paged_attention(
        *positional,
        window=jnp.int32(0),
        return_lse=True,
        implementation=implementation,
    )
    assert not output.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("storage", dealt(["float16", "bfloat16 bits", "bfloat16"]))
def test_half_precision(storage):
    """Sums are float32: the result is the reference's, rounded once."""
    operands = small_operands()
    dtype = jnp.dtype(storage.split()[0])
    positional = arguments(operands)
    positional[0] = positional[0].astype(dtype)
    positional[1:3] = [pool.astype(dtype) for pool in positional[1:3]]
    expected = paged_attention(*positional, implementation="reference")
    options = {}
    if storage == "bfloat16 bits":
        positional[1:3] = [pool.view(np.uint16) for pool in positional[1:3]]
        options = {"kv_dtype": jnp.bfloat16}
    output = paged_attention(*positional, implementation="xla", **options)
    assert output.dtype == expected.dtype == dtype
    assert_close(output, expected)
    assert not is_close(jnp.zeros_like(output), expected)
    if options:
        bits = paged_attention(*positional, implementation="reference", **options)
        np.testing.assert_array_equal(bits, expected)


quantize = jax.jit(formats.quantize, static_argnums=1)
restore = jax.jit(formats.restore, static_argnums=2)
ONE_BYTE = ["int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"]


def quantized(positional, dtype):
    """Return the arguments with quantized pools, their scales, and decoded values."""
    dtype = jnp.dtype(dtype)
    stored = [quantize(pool, dtype) for pool in positional[1:3]]
    (keys, key_scales), (values, value_scales) = stored
    scales = dict(key_scales=key_scales, value_scales=value_scales, kv_dtype=dtype)
    meaning = [restore(*each, dtype) for each in stored]
    return (
        [positional[0], keys, values, *positional[3:]],
        scales,
        [positional[0], *meaning, *positional[3:]],
    )


@pytest.mark.parametrize("implementation", few(IMPLEMENTATIONS, None))
@pytest.mark.parametrize("dtype", dealt(ONE_BYTE, share=4))
def test_8_bit_pools_equal_decoded_pools(dtype, implementation):
    """Unused slots hold NaN."""
    for batch in ("decode", "mixed"):
        operands = small_operands(batch, group=2, block_size=4)
        positional, scales, meaning = quantized(arguments(operands), dtype)
        options = dict(window=jnp.int32(7), soft_cap=2.0, return_lse=True)
        expected = paged_attention(*meaning, implementation="reference", **options)
        found = paged_attention(
            *positional, **scales, implementation=implementation, **options
        )
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
        # The tolerance is smaller than the effect of other tokens' scales.
        scales["value_scales"] = np.roll(scales["value_scales"], 1, axis=3)
        wrong, _ = paged_attention(
            *positional, **scales, implementation=implementation, **options
        )
        assert not is_close(wrong, expected[0])


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
@pytest.mark.one_end
def test_scales_of_any_float_dtype(implementation):
    """Powers of two are exact in all of them."""
    operands = small_operands("decode", shape=BYTES)
    positional, scales, _ = quantized(arguments(operands), "int8")
    positional[0] = positional[0].astype(BYTES.queries)
    shape = scales["key_scales"].shape
    halves = 0.5 ** (np.arange(np.prod(shape)).reshape(shape) % 5 + 4)
    results = []
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16, jnp.uint16):
        given = halves.astype(jnp.bfloat16 if dtype == jnp.uint16 else dtype)
        given = given.view(dtype)
        results.append(
            paged_attention(
                *positional,
                key_scales=given,
                value_scales=given,
                max_query_length=1,
                implementation=implementation,
            )
        )
    assert np.asarray(results[0]).any()
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.one_end
def test_small_scales_survive_half_precision_queries():
    """A weight times a scale of 1e-6 is below float16's full precision."""
    positional = arguments(small_operands(shape=HALF_BYTES))
    positional[0] = positional[0].astype(np.float16)
    positional[2] = positional[2] * np.float32(1e-4)
    positional, scales, meaning = quantized(positional, "int8")
    expected = paged_attention(*meaning, implementation="reference")
    output = paged_attention(*positional, implementation="pallas", **scales)
    assert np.abs(expected).max() > 5e-5
    np.testing.assert_allclose(
        output.astype(np.float32), expected.astype(np.float32), rtol=0.02, atol=2e-6
    )


@pytest.mark.parametrize("dtype", ONE_BYTE[1:])
@pytest.mark.one_end
def test_fp8_without_scales(dtype):
    """Pools are in their own dtype or as bits, as other libraries store them."""
    positional = arguments(small_operands())
    pools = [pool.astype(dtype) for pool in positional[1:3]]
    positional[1:3] = [pool.astype(np.float32) for pool in pools]
    expected = paged_attention(*positional, implementation="reference")
    positional[1:3] = pools
    attend = functools.partial(paged_attention, implementation="xla")
    assert_close(attend(*positional), expected)
    positional[1:3] = [pool.view(np.uint8) for pool in pools]
    assert_close(attend(*positional, kv_dtype=dtype), expected)


def test_gradients_pass_through_quantized_pools():
    """Queries get the gradients of decoded pools; the pools get none."""
    positional, scales, meaning = quantized(arguments(small_operands()), "int8")

    def gradient(call, **options):
        def loss(queries):
            return jnp.sum(jnp.sin(paged_attention(queries, *call[1:], **options)))

        return jax.jit(jax.grad(loss))(call[0])

    assert_close(gradient(positional, **scales), gradient(meaning))


@pytest.mark.one_end
def test_large_half_precision_values_do_not_overflow():
    """Partial sums in float16 would overflow."""
    pool = np.full((1, 5, 1, 4, 8), 6e4, np.float16)
    output = paged_attention(
        np.zeros((1, 1, 8), np.float16),
        np.zeros_like(pool),
        pool,
        0,
        np.arange(5, dtype=np.int32)[None],
        None,
        *np.array([[0], [1], [20]], np.int32),
        implementation="xla",
    )
    assert_close(output, np.full((1, 1, 8), 6e4))


@pytest.mark.one_end
def test_pools_without_layers_and_with_traced_scalars():
    """layer=None; a window and a scale that vary between calls."""
    operands = small_operands()
    positional = arguments(operands)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def attend(layer, window, scale):
        return paged_attention(
            *positional[:3],
            layer,
            *positional[4:],
            window=window,
            scale=scale,
            implementation="xla",
        )

    for layer, window, scale in ((0, 4, 0.2), (1, 9, 0.5)):
        output = attend(np.int32(layer), np.int32(window), np.float32(scale))
        slices = [pool[layer] for pool in positional[1:3]]
        alone = paged_attention(
            positional[0],
            *slices,
            None,
            *positional[4:],
            window=window,
            scale=scale,
            implementation="reference",
        )
        assert_close(output, alone)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "pallas"])
@pytest.mark.one_end
def test_decode_only_calls_omit_prefill(implementation):
    """Results are equal without the part for several rows."""
    operands = small_operands("decode", shape=SMALL)
    positional = arguments(operands, dtype=SMALL.queries)
    attend = functools.partial(
        paged_attention, window=WIDE, return_lse=True, implementation=implementation
    )
    expected = attend(*positional)
    found = attend(*positional, max_query_length=1)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    if implementation == "xla":
        whole, part = (
            jax.jit(functools.partial(attend, max_query_length=most))
            .lower(*positional)
            .as_text()
            .count("stablehlo.while")
            for most in (None, 1)
        )
        assert 0 < part < whole


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.one_end
def test_small_calls_loop_over_columns_together(window):
    """Several trips, none of them before the window of the first row."""
    workload = decode("small", (96, 5, 81, 33) * 2, num_kv_heads=4, num_layers=2)
    operands = make_operands(workload)
    expected, _ = attend_loop(operands, LAYER, window=window)
    output = paged_attention(
        *arguments(operands, workload.num_rows), window=window, max_query_length=1
    )
    assert_close(output, expected)
    assert not is_close(jnp.roll(output, 1, axis=0), expected)


@pytest.mark.parametrize("options", [{}, {"window": 40, "soft_cap": 2.0}])
@pytest.mark.one_end
def test_few_rows_of_a_request_read_its_blocks_once(options):
    """Tiles of eight rows: one, two, part of one, none; then padding rows."""
    workload = Workload(
        name="few rows",
        query_lengths=(8, 1, 11, 0, 3, 7),
        context_lengths=(100, 1, 97, 5, 64, 7),
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        value_head_dim=24,
        num_layers=2,
    )
    operands, num_rows = make_operands(workload), workload.num_rows
    sinks = np.linspace(-1.0, 2.0, 6, dtype=np.float32)
    attend = jax.jit(
        functools.partial(paged_attention, return_lse=True, sinks=sinks, **options)
    )
    positional = arguments(operands, num_rows + 2)
    expected = attend_loop(operands, LAYER, sinks=sinks, **options)
    output, lse = attend(*positional)
    for found, wanted in zip((output, lse), expected, strict=True):
        assert_close(found[:num_rows], wanted)
        assert not is_close(jnp.roll(found[:num_rows], 1, axis=0), wanted)
    assert not output[num_rows:].any() and np.isneginf(lse[num_rows:]).all()
    # Eight columns of six requests' keys for two heads, not of 32 rows'.
    text = attend.lower(*positional).as_text()
    assert "tensor<96x512xf32>" in text and "tensor<512x512xf32>" not in text


@pytest.mark.one_end
def test_the_last_token_may_start_a_chunk():
    """Tiles of rows read 256 tokens at a time, decode pieces 32."""
    workload = Workload(
        name="chunks",
        query_lengths=(2, 3, 1, 1),
        context_lengths=(257, 256, 257, 33),
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        value_head_dim=16,
        num_layers=2,
    )
    operands = make_operands(workload)
    expected, _ = attend_loop(operands, LAYER)
    positional = arguments(operands, workload.num_rows)
    output = paged_attention(*positional, implementation="xla")
    assert_close(output, expected)


@pytest.mark.one_end
def test_work_is_proportional_to_the_context_lengths():
    """Pieces between the edges, by hand: 4 tokens a block, 2 blocks a piece."""
    contexts = [1000, 32, 0, 33, 4, 5, 13]
    lengths = [1, 1, 1, 1, 1, 5, 1]  # one prefill, one empty
    plan = functools.partial(
        make_requests, num_rows=99, block_size=4, max_query_length=None
    )
    row = np.arange(7, dtype=np.int32)
    requests = jax.jit(plan)(
        Requests(
            block_tables=np.zeros((7, 300), np.int32),
            seq_ids=row,
            query_starts=row,
            query_lengths=np.array(lengths, np.int32),
            context_lengths=np.array(contexts, np.int32),
        )
    )

    @jax.jit
    def list_pieces(requests, window):
        return list_work(requests, window, 4, skip=None, piece_blocks=2, padding=3)

    work = list_pieces(requests, None)
    # Last blocks are edges: 249, 7, 8, 0 and 3 blocks are left.
    assert int(work.num_requests) == 5
    assert int(work.num_pieces) == 125 + 4 + 4 + 0 + 2
    # A window of 8 tokens: first and last visible block are edges, 0 or 1 between.
    work = list_pieces(requests, np.int32(8))
    assert int(work.num_requests) == 5
    assert int(work.num_pieces) == 0 + 0 + 1 + 0 + 1


@pytest.mark.parametrize("storage", few(["float32", "float16", "uint16"], "uint16"))
def test_compiled_module_never_copies_a_pool(storage):
    """Half a GiB of pool, scan over layers: no array of that size, little memory."""
    layers, blocks, kv_heads, block_size, head_dim = shape = (8, 16384, 2, 16, 64)
    requests, max_blocks = 64, 4096
    pool = jax.ShapeDtypeStruct(shape, storage)
    queries = jax.ShapeDtypeStruct((layers, 128, 4, head_dim), jnp.float32)
    tables = jax.ShapeDtypeStruct((requests, max_blocks), jnp.int32)
    counts = jax.ShapeDtypeStruct((requests,), jnp.int32)

    def attend_layers(queries, keys, values, tables, starts, lengths, contexts):
        def attend_layer(pools, layer):
            output = paged_attention(
                queries[layer],
                *pools,
                layer,
                tables,
                None,
                starts,
                lengths,
                contexts,
                kv_dtype=jnp.bfloat16 if storage == "uint16" else None,
            )
            return pools, output

        return jax.lax.scan(
            attend_layer, (keys, values), jnp.arange(layers, dtype=jnp.int32)
        )

    compiled = (
        jax.jit(attend_layers, donate_argnums=(1, 2))
        .lower(queries, pool, pool, tables, counts, counts, counts)
        .compile(ALL_PASSES)
    )
    layer_elements = blocks * kv_heads * block_size * head_dim
    for line in compiled.as_text().splitlines():
        match = re.search(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", line)
        if match and np.prod([int(n) for n in match[1].split(",")]) >= layer_elements:
            assert match[2] in {"parameter", "bitcast", "get-tuple-element"}, line
    pool_bytes = np.prod(shape) * np.dtype(storage).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < pool_bytes / 8


@pytest.mark.one_end
def test_invalid_arguments_are_explained():
    operands = small_operands()
    good = arguments(operands)
    # Finite pools, as casting NaN would warn.
    keys = np.nan_to_num(good[1])

    def refuses(words, *changes, **options):
        bad = list(good)
        for index, value in changes:
            bad[index] = value
        with pytest.raises(ValueError, match=words):
            paged_attention(*bad, **options)

    refuses(
        "None or one of 'pallas', 'triton', 'xla_small', 'xla'", implementation="cuda"
    )
    refuses(r"queries must be float\[R, H, D\]", (0, good[0][0]))
    refuses("key_pool must be .*layer=None drops", (1, good[1][0]))
    refuses(r"key_pool must be \[N, K, T, D\]", (3, None))
    refuses(
        "value_pool must be .* with L = 2, .* as key_pool",
        (2, good[2][:1]),
    )
    refuses("D = 16, D that of key_pool, got", (0, good[0][..., :15]))
    refuses("multiple of 2 heads.* got 3", (0, jnp.ones((5, 3, 16))))
    refuses(r"sinks must be \[H\] with H = 2", sinks=jnp.ones(3))
    refuses(r"queries must be float\[.* got int32", (0, good[0].astype(jnp.int32)))
    refuses("must be floating point or int8, uint16", (1, keys.astype(jnp.int16)))
    refuses("key_scales must be given for key_pool of int8", (1, keys.astype(jnp.int8)))
    refuses("pass kv_dtype=bfloat16", (1, keys.astype(jnp.uint16)))
    refuses("float8_e4m3fn or .*got None", (1, keys.astype(jnp.uint8)))
    eighths = (1, keys.astype(jnp.int8))
    scales = jnp.ones(good[1].shape[:4])
    refuses("got float32; omit them", key_scales=scales)
    refuses("key_scales must be .L, N, K, T", eighths, key_scales=scales[..., 1:])
    refuses("must be floating point, or uint16", eighths, key_scales=scales > 0)
    refuses("omit value_scales", (2, None), value_head_dim=8, value_scales=scales)
    refuses("only pools of raw bits need it", kv_dtype=jnp.bfloat16)
    refuses("query_lengths must be .* with B = ", (7, good[7][:2]))
    refuses(
        "context_lengths must be int32.*got float32",
        (8, good[8].astype(jnp.float32)),
    )
    refuses(r"block_tables must be int32\[S, M\]", (4, good[4][0]))
    refuses("block_tables has 2 rows", (4, good[4][:2]), (5, None))
    refuses(r"window must be in 1\.\.2\^31-1", window=0)
    refuses(r"window must be in 1\.\.2\^31-1", window=np.int64(0))
    for window in (2.5, True, jnp.float32(3), jnp.array([3])):
        refuses("a number of tokens, got", window=window)
    refuses("soft_cap must be above 0", soft_cap=0.0)
    refuses("max_query_length must be a static int", max_query_length=0)

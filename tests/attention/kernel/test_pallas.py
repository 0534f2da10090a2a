"""The kernel compared with a plain loop: interpreted on a CPU, compiled on a GPU.

`implementation="pallas"` selects between the two. The interpreter copies every operand
for every program, so the pools are tiny.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention import formats
from support.attention.attention_workloads import Workload, make_operands
from support.attention.plain_attention import attend_loop
from support.attention.served_shapes import IS_INTERPRETED, Shape, fit
from support.jax_versions import dealt, with_further
from support.tolerances import assert_close, is_close

from jkv.attention import paged_attention
from jkv.attention.kernel.bodies import loads, scores, walk
from jkv.attention.kernel.elements import conversion
from jkv.attention.kernel.elements.formats import KernelFormat
from jkv.attention.kernel.tiles import table as tile_table
from jkv.attention.kernel.tiles.table import Techniques

quantize = jax.jit(formats.quantize, static_argnums=1)
restore = jax.jit(formats.restore, static_argnums=2)


@jax.jit
def turn_and_back(rows):
    rotated = formats.FORMATS[jnp.dtype("int4")].rotate(rows)
    return formats.FORMATS[jnp.dtype("int4")].rotate_back(rotated.astype(jnp.float32))


# Prefill techniques on AMD CDNA.
OF_PROMPTS = Techniques.FULL_FIRST | Techniques.SCALAR_IDS
OF_PROMPTS |= Techniques.EXP2_IN_PAIRS | Techniques.ROUNDED_BY_BITS

LAYER = 1
NUM_ROWS = 12

# (query length, context length) of each request; all share one trace.
BATCHES = {
    "decode": [(1, 70), (1, 1), (1, 17), (1, 33)],
    # The five rows cross a tile boundary, whatever the tile size.
    "mixed": [(5, 66), (1, 40), (0, 6), (4, 4)],
    "idle": [(0, 4), (0, 0), (1, 0), (1, 16)],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes, storage and options of a compiled call."""

    kv_heads: int = 2
    group: int = 1
    head_dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    storage: str = "float32"
    values: str | None = None  # dtype of values, if different
    queries: str = "float32"
    is_latent: bool = False
    has_sinks: bool = False
    options: tuple[tuple[str, float], ...] = ()

    def operands(self, batch: str, seed: int = 0):
        query_lengths, context_lengths = zip(*BATCHES[batch], strict=True)
        blocks = max(
            sum(-(-length // self.block_size) for _, length in requests)
            for requests in BATCHES.values()
        )
        return make_operands(
            Workload(
                name=batch,
                query_lengths=query_lengths,
                context_lengths=context_lengths,
                num_heads=self.kv_heads * self.group,
                num_kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                value_head_dim=self.value_dim,
                block_size=self.block_size,
                num_layers=2,
            ),
            seed,
            num_blocks=blocks + 1,
            max_blocks=-(-72 // self.block_size),
        )

    @property
    def dtypes(self):
        """Return the stored dtypes of keys and of values."""
        return self.storage, self.values or self.storage

    def arguments(self, operands):
        """Return the arguments of `paged_attention`, padded to NUM_ROWS rows."""
        rows = operands.queries[LAYER]
        padded = np.full((NUM_ROWS, *rows.shape[1:]), 3.0, np.float32)
        padded[: len(rows)] = rows
        pools = [operands.key_pool, operands.value_pool]
        # In unused slots NaN becomes a NaN scale.
        pools, scales = zip(
            *(
                quantize(pool, jnp.dtype(dtype))
                for pool, dtype in zip(pools, self.dtypes, strict=True)
            ),
            strict=True,
        )
        if self.is_latent:
            pools, scales = (pools[0], None), (scales[0], None)
        arrays = [padded.astype(jnp.dtype(self.queries)), *pools, np.int32(LAYER)]
        arrays += [operands.block_tables, np.arange(4, dtype=np.int32)]
        return arrays + [*operands[4:7], *scales]

    def expect(self, operands, arguments):
        """Return the expected rows in float64, from the rounded operands."""

        def read(pool, scales, dtype):
            if dtype == "int4":
                numbers = np.asarray(restore(pool, scales, dtype))
            else:
                pool = np.asarray(pool)
                is_bits = pool.dtype in (np.uint8, np.uint16)
                numbers = pool.view(jnp.dtype(dtype)) if is_bits else pool
                numbers = numbers.astype(np.float32)
                if scales is not None:
                    scales = np.asarray(scales).view(jnp.bfloat16).astype(np.float32)
                    numbers *= scales[..., None]
            found, size = [], self.block_size
            requests = zip(operands.block_tables, operands.context_lengths, strict=True)
            for table, length in requests:
                token = np.arange(length)
                tokens = numbers[:, table[token // size], :, token % size]
                found.append(np.moveaxis(tokens, 0, 1))
            return found

        keys = read(arguments[1], arguments[9], self.dtypes[0])
        if self.is_latent:
            values = [rows[..., : self.value_dim] for rows in keys]
        else:
            values = read(arguments[2], arguments[10], self.dtypes[1])
        queries = operands.queries.astype(jnp.dtype(self.queries))
        if self.storage == "int4":  # they are rotated before rounding
            queries = turn_and_back(queries)
        queries = np.asarray(queries, np.float32)
        meant = operands._replace(queries=queries, keys=keys, values=values)
        found = attend_loop(meant, LAYER, sinks=self.sinks(), **dict(self.options))
        used = len(found[0])
        output = np.zeros((NUM_ROWS, *found[0].shape[1:]))
        lse = np.full(output.shape[:2], -np.inf)
        output[:used], lse[:used] = found
        return output, lse

    def sinks(self):
        """Return a number for each head, or None."""
        num_heads = self.kv_heads * self.group
        numbers = np.linspace(-1.0, 2.0, num_heads, dtype=np.float32)
        return numbers if self.has_sinks else None

    def attend(self, implementation, by_position=False):
        """Return the call as a function of the positional arguments."""

        def attend(*arguments):
            *arguments, key_scales, value_scales = arguments
            return paged_attention(
                *arguments,
                sinks=self.sinks(),
                return_lse=True,
                key_scales=key_scales,
                value_scales=value_scales,
                kv_dtype=self.dtypes[0],
                value_dtype=self.dtypes[1],
                value_head_dim=self.value_dim if self.is_latent else None,
                implementation=implementation,
                by_position=by_position,
                **dict(self.options),
            )

        return attend


def case(**fields) -> Case:
    return Case(options=tuple(fields.pop("options", {}).items()), **fields)


def fitted(this: Case, is_derived: bool = False) -> Case:
    """Return the case in the nearest shape that the current GPU serves."""
    # int4 rows are rotated whole, and values within keys are sliced afterwards.
    is_cut = this.is_latent and "int4" in this.dtypes
    value_dim = this.head_dim if is_cut else this.value_dim
    fields = this.head_dim, value_dim, this.queries, *this.dtypes
    found = fit(Shape(*fields, is_derived))
    return dataclasses.replace(
        this,
        head_dim=found.head_dim,
        value_dim=this.value_dim if is_cut else found.value_dim,
        queries=found.queries,
        storage=found.keys,
        values=this.values and found.values,
    )


BITS = {"storage": "bfloat16", "queries": "bfloat16"}
EVERYTHING = {"window": 19, "soft_cap": 2.0, "scale": 0.2}
CASES = {
    "one head per kv head": case(),
    "group of 2, blocks of 1, window of 1": case(
        group=2, block_size=1, options={"window": 1}
    ),
    "group of 12, head dim 96": case(group=12, head_dim=96, value_dim=32, **BITS),
    "more heads than a tile": case(kv_heads=1, group=80, block_size=4, head_dim=16),
    "float16, blocks of 256, everything": case(
        group=3,
        block_size=256,
        storage="float16",
        queries="float16",
        has_sinks=True,
        options=EVERYTHING,
    ),
    "float32 queries, bfloat16 bits": case(
        storage="bfloat16", queries="float32", options=EVERYTHING
    ),
    "latent": case(
        kv_heads=1, group=16, head_dim=576, value_dim=512, is_latent=True, **BITS
    ),
    "int8, group of 4, head dim 128": case(
        group=4, head_dim=128, value_dim=128, storage="int8", queries="bfloat16"
    ),
    "int8, float16 queries, blocks of 48": case(
        group=3,
        head_dim=40,
        value_dim=24,
        block_size=48,
        storage="int8",
        queries="float16",
        has_sinks=True,
        options=EVERYTHING,
    ),
    "e4m3fn, group of 7, window": case(
        group=7, head_dim=80, storage="float8_e4m3fn", options={"window": 19}
    ),
    "e4m3fnuz, multi-query 16, soft cap": case(
        kv_heads=1,
        group=16,
        head_dim=192,
        value_dim=128,
        storage="float8_e4m3fnuz",
        queries="float16",
        options={"soft_cap": 1.5},
    ),
    "e5m2, head dim 256, blocks of 64, sinks": case(
        head_dim=256,
        value_dim=256,
        block_size=64,
        storage="float8_e5m2",
        queries="bfloat16",
        has_sinks=True,
    ),
    "latent, int8, float16 queries": case(
        kv_heads=1,
        group=5,
        head_dim=48,
        value_dim=32,
        is_latent=True,
        storage="int8",
        queries="float16",
    ),
    "latent, values as wide as keys": case(
        kv_heads=1, group=4, head_dim=48, value_dim=48, is_latent=True, **BITS
    ),
    "bfloat16 keys, int8 values": case(
        group=3, head_dim=48, value_dim=48, values="int8", **BITS
    ),
    "int8 keys, int4 values, everything": case(
        group=3,
        head_dim=48,
        value_dim=64,
        block_size=24,
        storage="int8",
        values="int4",
        queries="bfloat16",
        has_sinks=True,
        options=EVERYTHING,
    ),
    "int4, float16 queries": case(
        group=4, head_dim=64, value_dim=80, storage="int4", queries="float16"
    ),
    "latent, int4": case(
        kv_heads=1,
        group=5,
        head_dim=64,
        value_dim=32,
        is_latent=True,
        storage="int4",
        queries="bfloat16",
    ),
    "int4 keys, float32": case(
        storage="int4", values="float32", queries="float32", options={"window": 19}
    ),
    "latent, dims in eights, blocks of 3": case(
        kv_heads=1,
        group=5,
        head_dim=56,
        value_dim=40,
        block_size=3,
        is_latent=True,
        has_sinks=True,
        options=EVERYTHING,
    ),
}
CASES = {name: fitted(this) for name, this in CASES.items()}
DERIVED = fitted(case(group=2, head_dim=16, value_dim=16, has_sinks=True), True)
LONG = fit(Shape())
LARGE = fit(Shape(16, 16, *["float16"] * 3))

# Options and dtypes that other cases cover, too.
FURTHER = (
    "group of 12, head dim 96",
    "float32 queries, bfloat16 bits",
    "e4m3fn, group of 7, window",
    "e5m2, head dim 256, blocks of 64, sinks",
    "latent, int8, float16 queries",
    "int4, float16 queries",
    "latent, int4",
    "int4 keys, float32",
)


@pytest.mark.parametrize("name", dealt(with_further(CASES, *FURTHER), turn=7, share=14))
def test_equals_the_plain_loop(name):
    """Decode, mixed and idle batches share one trace; unused slots hold NaN."""
    this = CASES[name]
    attend = jax.jit(chex.assert_max_traces(n=1)(this.attend("pallas")))
    for seed, batch in enumerate(BATCHES):
        operands = this.operands(batch, seed)
        arguments = this.arguments(operands)
        output, lse = jax.device_get(attend(*arguments))
        expected, expected_lse = this.expect(operands, arguments)
        assert output.dtype == this.queries
        # Weights times scales are multiplied in bfloat16 for its range.
        is_coarse = this.queries == "float16" and arguments[9] is not None
        assert_close(output.astype(jnp.bfloat16) if is_coarse else output, expected)
        # Compiled kernels rotate int4 queries in their own dtype.
        is_rotated = "int4" in this.dtypes and this.queries != "float32"
        is_coarse = is_rotated and not IS_INTERPRETED
        assert_close(lse.astype(jnp.float16) if is_coarse else lse, expected_lse)

        # The tolerance is smaller than the effect of these mistakes.
        if batch == "decode":
            again, lse_again = attend(*arguments)
            np.testing.assert_array_equal(again, output)
            np.testing.assert_array_equal(lse_again, lse)
            shifted, permuted = list(arguments), list(arguments)
            shifted[8] = np.maximum(arguments[8] - 1, 1)
            assert not is_close(np.asarray(attend(*shifted)[1])[0], expected_lse[0])
            permuted[4] = np.roll(arguments[4], 1, axis=0)
            assert not is_close(np.asarray(attend(*permuted)[0])[2], expected[2])
            assert not is_close(np.zeros_like(output), expected)

            # Table entries out of range within a context: wrong numbers, but finite.
            if np.asarray(arguments[1]).dtype in (np.float32, np.float16):
                rubbish = list(arguments)
                rubbish[1:3] = [
                    None if pool is None else np.nan_to_num(pool)
                    for pool in arguments[1:3]
                ]
                rubbish[4] = np.full_like(arguments[4], 2**31 - 1)
                rubbish[4][1] = -(2**31)
                assert np.isfinite(attend(*rubbish)[0]).all()


@pytest.mark.one_end
@pytest.mark.parametrize(
    "name",
    with_further(
        [
            "latent, dims in eights, blocks of 3",
            "int8, float16 queries, blocks of 48",
            "int8 keys, int4 values, everything",
        ],
        "latent, dims in eights, blocks of 3",
    ),
)
def test_pieces_by_position_equal_the_plain_loop(name):
    """`test_kernel_by_position.py` tests their sums."""
    this = CASES[name]
    attend = jax.jit(this.attend("pallas", by_position=True))
    for batch in BATCHES:
        operands = this.operands(batch)
        arguments = this.arguments(operands)
        output, lse = jax.device_get(attend(*arguments))
        expected, expected_lse = this.expect(operands, arguments)
        is_coarse = this.queries == "float16" and arguments[9] is not None
        assert_close(output.astype(jnp.bfloat16) if is_coarse else output, expected)
        assert_close(lse, expected_lse)
        assert not is_close(np.zeros_like(output), expected)


@pytest.mark.one_end
@pytest.mark.interpreted(reason="it changes the interpreter's tiles")
@pytest.mark.parametrize("kernel", ("decode", "prefill"))
def test_tiles_carried_between_trips(monkeypatch, kernel):
    """CDNA's techniques, blocks smaller than a tile, and a window."""
    called = []

    def count(name, function):
        def counted(*arguments, **options):
            called.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(walk, name, counted)

    for function in (loads.to_operands, scores.exp2_in_pairs, conversion.round_by_bits):
        count(function.__name__, function)
    is_prefill = kernel == "prefill"
    tile = dataclasses.replace(
        getattr(tile_table.INTERPRETED, kernel),
        ways=Techniques.CARRIED
        | Techniques.WORDS
        | (OF_PROMPTS if is_prefill else Techniques(0)),
        section=32,
    )
    tuning = dataclasses.replace(tile_table.INTERPRETED, **{kernel: tile})
    monkeypatch.setattr(tile_table, "INTERPRETED", tuning)
    # Shapes of this test only, as traces are cached.
    this = case(
        group=3,
        head_dim=48,
        value_dim=32,
        block_size=8,
        storage="int8",
        queries="bfloat16" if is_prefill else "float32",
        options={} if is_prefill else {"window": 41},
    )
    attend, reference = (jax.jit(this.attend(n)) for n in ("pallas", "reference"))
    for batch in BATCHES:
        arguments = this.arguments(this.operands(batch))
        for one, other in zip(attend(*arguments), reference(*arguments), strict=True):
            assert_close(one, other)
    expected = {"to_operands"}
    if is_prefill:
        expected |= {"exp2_in_pairs", "round_by_bits"}
    assert set(called) == expected


@pytest.mark.one_end
@pytest.mark.interpreted(reason="it changes the interpreter's tiles")
def test_latent_words_with_hopper_techniques(monkeypatch):
    """Words of e4m3 that are not carried, in sections, converted for both products."""
    ways = Techniques.WORDS | Techniques.E4M3_WORDS
    tile = tile_table.INTERPRETED.decode
    tile = dataclasses.replace(tile, ways=ways, section=32)
    tuning = dataclasses.replace(tile_table.INTERPRETED, decode=tile)
    monkeypatch.setattr(tile_table, "INTERPRETED", tuning)
    of_words, sizes = KernelFormat.words_to_operand, []

    def convert(kept, words, dtype, **options):
        sizes.append(words.shape[-1])
        return of_words(kept, words, dtype, **options)

    monkeypatch.setattr(KernelFormat, "words_to_operand", convert)
    this = case(
        **{"kv_heads": 1, "group": 3, "head_dim": 112, "value_dim": 64},
        **{"block_size": 8, "storage": "float8_e4m3fn", "is_latent": True},
        options={"max_query_length": 1},
    )
    attend, reference = (jax.jit(this.attend(n)) for n in ("pallas", "reference"))
    arguments = this.arguments(this.operands("decode"))
    for one, other in zip(attend(*arguments), reference(*arguments), strict=True):
        assert_close(one, other)
    # Values are the first two sections.
    assert sizes == [8, 8, 8, 4]


@pytest.mark.one_end
@pytest.mark.interpreted(reason="it changes the interpreter's tiles")
def test_prompts_with_cdna_techniques(monkeypatch):
    """Tiles of two blocks, a negative scale, and a key with scores of -inf."""
    tile = dataclasses.replace(tile_table.INTERPRETED.prefill, ways=OF_PROMPTS)
    tuning = dataclasses.replace(tile_table.INTERPRETED, prefill=tile)
    monkeypatch.setattr(tile_table, "INTERPRETED", tuning)
    this = case(head_dim=32, value_dim=16, block_size=8, options={"scale": -0.2})
    this = dataclasses.replace(this, **BITS)
    operands = this.operands("mixed")
    # The third token of the first request, which its five rows attend to.
    operands.queries[LAYER][..., 0] = np.abs(operands.queries[LAYER][..., 0])
    operands.key_pool[LAYER, operands.block_tables[0, 0], :, 2, 0] = np.inf
    arguments = this.arguments(operands)
    attend, reference = (jax.jit(this.attend(n)) for n in ("pallas", "reference"))
    found, expected = attend(*arguments), reference(*arguments)
    assert np.all(np.isfinite(found[0][:10]))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


@pytest.mark.one_end
def test_a_long_context_in_many_pieces():
    """More pieces than one join handles, beside requests of one piece."""
    contexts = (2900, 3, 300, 1)
    operands = make_operands(
        Workload(
            name="one long",
            query_lengths=(1,) * 4,
            context_lengths=contexts,
            num_heads=2,
            num_kv_heads=1,
            head_dim=LONG.head_dim,
            value_head_dim=LONG.value_dim,
            block_size=256,
            num_layers=1,
        )
    )
    floats = [operands.queries[0], operands.key_pool, operands.value_pool]
    arguments = [array.astype(LONG.queries) for array in floats] + [0]
    arguments += [operands.block_tables, None, *operands[4:7]]

    def call(implementation, window, *arguments):
        return paged_attention(
            *arguments, window=window, return_lse=True, implementation=implementation
        )

    attend, reference = (
        jax.jit(functools.partial(call, name)) for name in ("pallas", "reference")
    )

    for window in (5000, 2701, 1):  # traced
        output, lse = attend(np.int32(window), *arguments)
        expected = reference(np.int32(window), *arguments)
        assert_close(output, expected[0])
        assert_close(lse, expected[1])
    assert not attend(np.int32(0), *arguments)[0].any()


def attend_large_values():
    """Attend to 700 float16 tokens of value 60,000 with equal weights."""
    pool = np.full((1, 3, 1, 256, LARGE.head_dim), 6e4, np.float16)
    return paged_attention(
        np.zeros((1, 1, LARGE.head_dim), np.float16),
        np.zeros_like(pool),
        pool,
        0,
        np.arange(3, dtype=np.int32)[None],
        None,
        *np.array([[0], [1], [700]], np.int32),
        implementation="pallas",
    )


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    """Warm-up: the first interpreted call loads modules that make JAX 0.12 retrace."""
    attend_large_values()


def test_large_half_precision_values_do_not_overflow():
    """Unnormalized or float16 partial results would be infinite."""
    assert_close(attend_large_values(), np.full((1, 1, LARGE.head_dim), 6e4))


@pytest.mark.newest_further
def test_kernel_gradients_equal_the_plain_path():
    this = DERIVED
    arguments = this.arguments(this.operands("mixed"))

    def gradients(implementation):
        def loss(queries, keys, values):
            attend = this.attend(implementation)
            output, lse = attend(queries, keys, values, *arguments[3:])
            lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
            return jnp.sum(jnp.sin(output.astype(jnp.float32))) + jnp.sum(lse)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arguments[:3])

    is_coarse = this.queries == "float16"  # the result is rounded, too
    for one, other in zip(gradients("pallas"), gradients("xla"), strict=True):
        assert_close(one.astype(jnp.bfloat16) if is_coarse else one, other)
        assert np.asarray(other).any()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.one_end
def test_a_latent_cache_equals_separate_values(implementation):
    """Results and gradients are equal.

    The previous test covers the kernel's result; the kernel has no gradient of its own.
    """
    latent = CASES["latent, dims in eights, blocks of 3"]
    apart = dataclasses.replace(latent, is_latent=False)
    arguments = apart.arguments(latent.operands("mixed"))
    arguments[1:3] = np.nan_to_num(arguments[1]), None

    def loss(this, keys, values):
        call = [arguments[0], keys, values, *arguments[3:]]
        output, _ = this.attend(implementation)(*call)
        return jnp.sum(jnp.sin(output)), output

    def loss_latent(keys):
        return loss(latent, keys, None)

    def loss_apart(keys):
        return loss(apart, keys, keys[..., : latent.value_dim])

    keys = arguments[1]
    found, output = jax.jit(jax.grad(loss_latent, has_aux=True))(keys)
    expected, expected_output = jax.jit(jax.grad(loss_apart, has_aux=True))(keys)
    assert_close(output, expected_output)
    assert_close(found, expected)
    assert np.asarray(expected).any()


@pytest.mark.one_end
def test_refusals_report_the_reason():
    good = case().arguments(case().operands("decode"))

    def refuses(words, this, arguments):
        with pytest.raises(NotImplementedError, match=words):
            this.attend("pallas")(*arguments)

    for fields, words in (
        ({"head_dim": 20}, "the key head dim must be a multiple of 8 .* it is 20"),
        ({"value_dim": 8}, "value head dim .* it is 8"),
        ({"head_dim": 248}, "or one of 16 up to 576; it is 248"),
        ({"head_dim": 592}, "up to 576; it is 592"),
        ({"values": "int4", "value_dim": 40}, "multiple of 16 from 32 .*; it is 40"),
    ):
        odd = case(**fields)
        refuses(words, odd, odd.arguments(odd.operands("decode")))
    this = case(storage="float8_e4m3b11fnuz")
    eighths = [np.asarray(pool).astype(this.storage) for pool in good[1:3]]
    refuses("not float8_e4m3b11fnuz", this, [good[0], *eighths, *good[3:]])

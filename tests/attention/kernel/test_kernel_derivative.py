"""Kernel gradients, compared with the plain path and the reference.

Interpreted on a CPU, compiled on a GPU. Requests share blocks like the sequences of a
tree: a block accumulates over all rows that attend to it, and two calls are
bit-identical.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention import formats
from support.attention.kernel_lowering import find_kernels, lower, shape
from support.attention.served_shapes import Shape, fit, require
from support.jax_versions import few, with_further
from support.tolerances import assert_close, is_close

import jkv
from jkv.attention import backend, make_pools, paged_attention
from jkv.attention.backend import Call, Requests, make_requests
from jkv.attention.kernel.work.readers import list_readers

# Rows of each request, and its context in full blocks and tokens. Three requests share
# the first block, and the last request with rows all blocks of the second one; the
# first request has its own blocks, which are one tile if they are small.
ROWS = (6, 3, 7, 1, 0)
BLOCKS_AND_TOKENS = ((1, 2), (2, 1), (2, 3), (2, 1), (1, 0))
TABLES = ((8, 2, 9, -3), (5, 7, 0, 90), (5, 3, 1, 4), (5, 7, 0, 0), (5, 0, 0, 0))
NUM_BLOCKS = 9
NUM_ROWS = sum(ROWS) + 2  # two rows of padding
LAYER = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes, storage and options of a compiled call."""

    kv_heads: int = 2
    group: int = 3
    head_dim: int = 48
    value_dim: int = 32
    block_size: int = 4
    queries: str = "float32"
    pools: str = "float32"
    is_latent: bool = False
    options: tuple[tuple[str, object], ...] = ()

    @property
    def num_heads(self):
        return self.kv_heads * self.group

    def arguments(self):
        """Return queries, pools, sinks, scale; tables, starts, lengths, contexts."""
        rng = np.random.default_rng(0)
        draw = rng.standard_normal
        shape = (2, NUM_BLOCKS, self.kv_heads, self.block_size)
        contexts = self.contexts()
        used = np.zeros((NUM_BLOCKS, self.block_size), bool)
        for table, context in zip(TABLES, contexts, strict=True):
            token = np.arange(context)
            part, num_parts = dict(self.options).get("block_part", (0, 1))
            token = token[token // self.block_size % num_parts == part]
            blocks = np.array(table)[token // self.block_size // num_parts]
            used[blocks, token % self.block_size] = True
        hole = np.where(used, 0.0, np.nan)[None, :, None, :, None]
        pools = [
            (draw((*shape, dim)) + hole).astype(self.pools)
            for dim in (self.head_dim, self.value_dim)
        ]
        queries = draw((NUM_ROWS, self.num_heads, self.head_dim)).astype(self.queries)
        sinks = np.linspace(-1.0, 1.0, self.num_heads, dtype=np.float32)
        tables, lengths = np.array(TABLES, np.int32), np.array(ROWS, np.int32)
        starts = np.cumsum(lengths, dtype=np.int32) - lengths
        if self.is_latent:
            pools[1] = None
        variables = queries, *pools, sinks, np.float32(0.3)
        return variables, [tables, starts, lengths, contexts]

    def contexts(self):
        _, num_parts = dict(self.options).get("block_part", (0, 1))
        blocks, tokens = np.array(BLOCKS_AND_TOKENS, np.int32).T
        return (blocks * self.block_size + tokens) * num_parts

    def gradient(self, implementation, argnums=(0, 1, 2, 3, 4)):
        """Return the gradients of a loss that weighs every result differently."""
        options = dict(self.options)
        has_sinks = options.pop("has_sinks", False)
        rng = np.random.default_rng(1)
        shape = (NUM_ROWS, self.num_heads)
        weights = rng.standard_normal((*shape, self.value_dim)).astype(np.float32)
        lse_weights = rng.standard_normal(shape).astype(np.float32)

        def loss(queries, keys, values, sinks, scale, *requests):
            tables, *lengths = requests
            output, lse = paged_attention(
                *(queries, keys, values, LAYER, tables, None, *lengths),
                sinks=sinks if has_sinks else None,
                scale=scale,
                return_lse=True,
                value_head_dim=self.value_dim if self.is_latent else None,
                implementation=implementation,
                **options,
            )
            lse = jnp.where(jnp.isneginf(lse), 0.0, lse * lse_weights)
            return jnp.sum(output.astype(jnp.float32) * weights) + jnp.sum(lse)

        if self.is_latent:
            argnums = tuple(number for number in argnums if number != 2)
        return jax.jit(jax.grad(loss, argnums=argnums))

    def assert_close(self, actual, expected):
        """Assert equality within the tolerance of the call.

        In 16 bits the result (which `delta` sums) and d_scores are rounded, too.
        """
        coarse = {"float16": 8e-3, "bfloat16": 3.2e-2}
        if self.queries != self.pools or self.queries not in coarse:
            assert_close(actual, expected)
            return
        tolerance = coarse[self.queries]
        pair = (np.asarray(array, np.float64) for array in (actual, expected))
        np.testing.assert_allclose(*pair, rtol=tolerance, atol=tolerance)


def case(**fields):
    return Case(options=tuple(fields.pop("options", {}).items()), **fields)


def fitted(this: Case) -> Case:
    """Return the case in the nearest shape that the current GPU serves."""
    request = this.head_dim, this.value_dim, this.queries, this.pools, this.pools
    found = fit(Shape(*request, is_derived=True))
    return dataclasses.replace(
        this,
        head_dim=found.head_dim,
        value_dim=found.value_dim,
        queries=found.queries,
        pools=found.keys,
    )


EVERYTHING = {"window": 6, "soft_cap": 2.0, "has_sinks": True}
CASES = {
    "blocks smaller than a tile, everything": case(options=EVERYTHING),
    "latent, dims in eights, blocks of one tile and a half": case(
        **{"kv_heads": 1, "group": 5, "head_dim": 56, "value_dim": 40},
        **{"block_size": 48, "is_latent": True},
        options={"soft_cap": 2.0},
    ),
    "blocks of 16, more heads than a tile": case(
        kv_heads=1, group=40, block_size=16, head_dim=16, value_dim=16
    ),
    "float16, blocks of 2, window": case(
        **{"block_size": 2, "queries": "float16", "pools": "float16"},
        options={"window": 3},
    ),
    "bfloat16 queries": case(queries="bfloat16", head_dim=64, value_dim=16),
    "a part of each block of 8, dims in eights": case(
        **{"head_dim": 40, "value_dim": 24, "block_size": 4},
        options={"block_part": (np.int32(1), 2), "window": 9},
    ),
}
CASES = {name: fitted(this) for name, this in CASES.items()}
# One case is also compared with the reference, differentiated by JAX.
REFERRED, SECOND, *FURTHER = CASES


@pytest.mark.newest_further
@pytest.mark.parametrize("name", few(with_further(CASES, *FURTHER), REFERRED))
def test_gradients_equal_the_plain_path(name):
    """Queries, keys, values, sinks and scale; unused slots hold NaN and get zeros."""
    this = CASES[name]
    variables, requests = this.arguments()
    gradient = this.gradient("pallas")
    actual = jax.device_get(gradient(*variables, *requests))
    if name == REFERRED:
        expected = this.gradient("reference")(*variables, *requests)
        for one, other in zip(actual, expected, strict=True):
            this.assert_close(one, other)
    expected = jax.device_get(this.gradient("xla")(*variables, *requests))
    again = jax.device_get(gradient(*variables, *requests))
    has_sinks = dict(this.options).get("has_sinks", False)
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        this.assert_close(one, other)
        np.testing.assert_array_equal(again[number], one)
        is_sinks = number == (2 if this.is_latent else 3)
        assert not is_close(np.zeros_like(one), other) or is_sinks and not has_sinks
    assert not actual[1][np.isnan(variables[1])].any()
    assert not actual[0][sum(ROWS) :].any()

    # The tolerance is smaller than the effect of these mistakes.
    tables, starts, lengths, contexts = requests
    shifted = [tables, starts, lengths, np.maximum(contexts - 1, lengths)]
    rolled = np.concatenate([np.roll(tables[:3], 1, axis=0), tables[3:]])
    permuted = [rolled, starts, lengths, contexts]
    for wrong in (shifted, permuted):
        found = jax.device_get(gradient(*variables, *wrong))
        for number in (0, 1):
            assert not is_close(np.nan_to_num(found[number]), expected[number])


@pytest.mark.further
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_raw_bits_have_gradients_of_queries_only(dtype):
    """The sinks have gradients, too, as with the plain path."""
    this = case(options={**EVERYTHING, "kv_dtype": dtype})
    dims = this.head_dim, this.value_dim
    require(Shape(*dims, this.queries, dtype, dtype, is_derived=True))
    variables, requests = this.arguments()
    pools, scales = zip(
        *(formats.quantize(pool, jnp.dtype(dtype)) for pool in variables[1:3]),
        strict=True,
    )
    options = dict(this.options)
    if scales[0] is not None:
        options |= {"key_scales": scales[0], "value_scales": scales[1]}
    this = dataclasses.replace(this, options=tuple(options.items()))
    given = variables[0], *pools, *variables[3:], *requests
    actual = this.gradient("pallas", (0, 3))(*given)
    expected = this.gradient("xla", (0, 3))(*given)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)
        assert not is_close(np.zeros_like(one), other)


@pytest.mark.one_end
def test_readers_are_listed_by_block():
    """They are in request order; ids outside the pool and past the end are skipped."""
    this = case()
    _, requests = this.arguments()
    call = make_call_of(this, requests)
    block, length, first, end, request, column = map(np.asarray, list_readers(call))
    assert len(block) == NUM_BLOCKS and len(request) == len(ROWS) * 4
    assert (length == 1).all()
    found = {
        int(b): [(int(request[i]), int(column[i])) for i in range(start, stop)]
        for b, start, stop in zip(block, first, end, strict=True)
        if start < stop
    }
    # The last request has no rows.
    assert found == {
        0: [(1, 2), (3, 2)],
        1: [(2, 2)],
        2: [(0, 1)],
        3: [(2, 1)],
        5: [(1, 0), (2, 0), (3, 0)],
        7: [(1, 1), (3, 1)],
        8: [(0, 0)],
    }


# Two prompts of two blocks with two continuations each, and one with blocks of others
# at other columns.
RUNS = ((0, 1, 2, 3), (0, 1, 8, -1), (4, 5, 6, -1), (4, 5, 7, -1), (6, 8, -1, -1))


@pytest.mark.one_end
def test_blocks_with_the_same_readers_are_one_run():
    """At columns of one multiple of the run's size; each block is in one run."""
    this, most = case(), 2
    tables = np.array(RUNS, np.int32)
    contexts = this.block_size * np.sum(tables >= 0, axis=1, dtype=np.int32)
    ones = np.ones(len(RUNS), np.int32)
    call = make_call_of(this, [tables, np.cumsum(ones), ones, contexts])
    found = jax.jit(list_readers, static_argnums=1)(call, most)
    block, length, first, end, request, _ = map(np.asarray, found)
    runs = {
        tuple(block[most * number : most * number + count].tolist()): set(
            request[start:stop].tolist()
        )
        for number, (count, start, stop) in enumerate(
            zip(length, first, end, strict=True)
        )
        if start < stop
    }
    assert runs == {
        **{(0, 1): {0, 1}, (2, 3): {0}, (4, 5): {2, 3}},
        **{(6,): {2, 4}, (7,): {3}, (8,): {1, 4}},
    }


def make_call_of(this, requests):
    variables, _ = this.arguments()
    queries, keys, values, *_ = map(jnp.asarray, variables)
    tables, *lengths = map(jnp.asarray, requests)
    request = Requests(tables, jnp.arange(len(ROWS)), *lengths)
    return Call(
        queries=queries,
        pools=make_pools((keys, None), (values, None), has_layers=True),
        layer=jnp.int32(LAYER),
        requests=make_requests(
            request,
            num_rows=NUM_ROWS,
            block_size=this.block_size,
            max_query_length=None,
        ),
        scale=jnp.float32(1.0),
        window=None,
        sinks=None,
        soft_cap=None,
        max_query_length=None,
    )


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
@pytest.mark.one_end
def test_the_platform_selects_the_derivative(platform):
    """The kernels if the table has a row for any GPU, else the plain path."""

    def loss(queries, keys, values, *rest):
        output = paged_attention(queries, keys, values, *rest)
        return jnp.sum(output.astype(jnp.float32))

    def find_names(dtype):
        pool = shape(2, 64, 8, 16, 64, dtype=dtype)
        rows = shape(4, 32, 64, dtype=dtype)
        numbers = [shape(4) for _ in range(3)]
        given = rows, pool, pool, shape(), shape(4, 16), None, *numbers
        gradient = jax.grad(loss, argnums=(0, 1, 2))
        return [
            kernel.name for kernel in find_kernels(lower(gradient, given, platform))
        ]

    names = ["jkv_decode", "jkv_isolate", "jkv_join", "jkv_prefill"]
    gradients = ["jkv_isolate_queries", "jkv_query_gradients", "jkv_token_gradients"]
    assert sorted(find_names("float16")) == sorted(names + gradients)
    # NVIDIA's GPUs have a derivative where results equal the plain path's; an unknown
    # AMD GPU may lack float32 matrix products.
    kernels = gradients if platform == "cuda" else []
    assert sorted(find_names("float32")) == kernels


def score_loss(implementation, head_dim=32):
    """Return a loss over two prompts with two completions each, and its parameter."""
    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=head_dim,
        num_blocks=1,
        block_size=4,
        max_sequences=1,
        max_context_length=1,
    )
    prompts = np.array([[1, 2, 3, 4, 5, 6], [7, 1, 2, -1, -1, -1]], np.int32)
    continuations = np.array([[3, 4, 5], [6, -1, -1], [1, 1, 2], [4, 5, -1]], np.int32)

    def model(params, tokens, cache, batch):
        hidden = params[tokens] + params[batch.positions % 8]
        keys = hidden[:, None]
        cache = jkv.write(cache, 0, batch, keys, jnp.tanh(keys))
        queries = jnp.stack([hidden, -hidden], axis=1)
        attended = jkv.attend(cache, 0, batch, queries, implementation=implementation)
        rows = hidden + attended.sum(axis=1)
        return (rows @ params.T)[batch.logit_rows], cache

    def loss(params):
        scores = jkv.score(model, params, prompts, continuations, config=config)
        return jnp.sum(scores * jnp.array([[1.0], [2.0], [-1.0], [0.5]]))

    rng = np.random.default_rng(0)
    return loss, rng.standard_normal((8, head_dim), np.float32)


@pytest.mark.parametrize(
    "platform, target, head_dim", [("cuda", "sm_90", 32), ("rocm", "gfx942", 64)]
)
@pytest.mark.one_end
def test_score_uses_the_kernel_on_a_gpu(monkeypatch, platform, target, head_dim):
    """Keys and values are float32, which GPUs multiply in different ways."""
    monkeypatch.setattr(backend, "find_target", {platform: target}.get)
    loss, params = score_loss(None, head_dim)
    given = (shape(*params.shape, dtype=params.dtype),)
    kernels = find_kernels(lower(jax.grad(loss), given, platform))
    names = {kernel.name for kernel in kernels}
    assert names >= {"jkv_prefill", "jkv_query_gradients", "jkv_token_gradients"}


@pytest.mark.further
def test_scores_have_the_gradient_of_the_plain_path():
    """A prompt's blocks, shared by its completions, are read by one program."""
    require(Shape(32, 32, is_derived=True))  # scores are always float32
    found = []
    for implementation in ("pallas", "xla"):
        loss, params = score_loss(implementation)
        found.append(jax.jit(jax.grad(loss))(params))
    assert_close(*found)
    assert not is_close(np.zeros_like(found[0]), found[1])

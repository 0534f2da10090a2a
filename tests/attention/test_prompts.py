"""Prompts without cached tokens, by attention over contiguous keys and values.

The dispatch, the rows read back and the selected rows are compared with the reference,
with `jax.nn.dot_product_attention(implementation="xla")` instead of cuDNN. cuDNN's own
calls are only lowered for CUDA, with JAX's version check patched.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.attention import formats
from support.attention.attention_workloads import Workload, make_operands
from support.attention.kernel_lowering import (
    find_kernels,
    lower,
    make_shapes,
    mesh_of_cards,
    shape,
)
from support.jax_versions import few, further
from support.tolerances import TOLERANCE, assert_close, is_close

import jkv
from jkv.attention import choice, paged_attention
from jkv.attention.backend import DEFAULT, DeviceType
from jkv.attention.cudnn import Cudnn, attend_prompts, find_prompt, without_prompt
from jkv.attention.kernel.interface import Pallas
from jkv.attention.xla.interface import attend_xla

NUM_ROWS, MIN_ROWS, MAX_BLOCKS, NUM_BLOCKS = 32, 30, 12, 40
LAYER = 1

# (query length, context length) of each request, and the index of the prompt.
BATCHES = {
    "a prompt alone": ([(32, 32), (0, 9), (0, 0), (0, 3)], 0),
    "the shortest": ([(30, 30), (0, 4), (1, 1), (1, 9)], 0),
    "one behind others": ([(1, 20), (0, 4), (30, 30), (1, 1)], 2),
    "one before others": ([(30, 30), (1, 25), (0, 6), (1, 16)], 0),
    "a chunk with a past": ([(30, 31), (1, 25), (0, 6), (1, 16)], None),
    "one that is too short": ([(29, 29), (1, 25), (1, 6), (1, 16)], None),
    "several": ([(16, 16), (8, 8), (7, 7), (1, 1)], None),
    "idle": ([(0, 4), (0, 0), (0, 9), (1, 2)], None),
}


def by_xla(queries, keys, values, scale):
    """Return JAX's causal attention in float32."""
    queries, keys, values = (
        each[None].astype(jnp.float32) for each in (queries, keys, values)
    )
    attend = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    with jax.default_matmul_precision("highest"):
        output = attend(queries, keys, values, scale=scale, is_causal=True)
    return output[0]


def in_sevens(queries, *_):
    """Return a constant, which shows the rows of this backend."""
    return jnp.full_like(queries, 7.0)


@dataclasses.dataclass(frozen=True)
class Prompts(Cudnn):
    """A backend like cuDNN's, for all platforms, with the plain path for other rows."""

    name = "prompts"
    platforms = (DEFAULT,)
    attend_contiguous = staticmethod(by_xla)

    def why_not(self, call, device):
        del call, device

    def attend(self, call, device):
        del device

        def attend_in_dtype(queries, keys, values):
            assert queries.dtype == keys.dtype == values.dtype
            output = self.attend_contiguous(queries, keys, values, self.scale)
            return output.astype(queries.dtype)

        return attend_prompts(
            call,
            attend=attend_xla,
            attend_contiguous=attend_in_dtype,
            min_rows=MIN_ROWS,
        )


class Sevens(Prompts):
    """A backend with wrong results for prompts."""

    name = "sevens"
    attend_contiguous = staticmethod(in_sevens)


@pytest.fixture(autouse=True)
def named(monkeypatch):
    """`implementation="prompts"` and "sevens", registered."""
    both = Prompts(others=()), Sevens(others=())
    monkeypatch.setattr(choice, "BACKENDS", (*choice.BACKENDS, *both))


def operands_of(batch, seed=0, dtype="float32", kv_dtype=None, group=2):
    """Return the positional and the keyword arguments of `paged_attention`."""
    query_lengths, context_lengths = zip(*BATCHES[batch][0], strict=True)
    workload = Workload(
        name=batch,
        query_lengths=query_lengths,
        context_lengths=context_lengths,
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=16,
        value_head_dim=16,
        block_size=4,
        num_layers=2,
    )
    made = make_operands(workload, seed, num_blocks=NUM_BLOCKS, max_blocks=MAX_BLOCKS)
    queries = np.full((NUM_ROWS, *made.queries.shape[2:]), 3.0, np.float32)
    queries[: workload.num_rows] = made.queries[LAYER]
    kv_dtype = jnp.dtype(kv_dtype or dtype)
    options = {"kv_dtype": kv_dtype}
    pools = []
    for name, pool in (("key", made.key_pool), ("value", made.value_pool)):
        elements, scales = formats.quantize(jnp.asarray(pool), kv_dtype)
        pools.append(elements)
        options[f"{name}_scales"] = scales
    seq_ids = np.arange(len(query_lengths), dtype=np.int32)
    rest = np.int32(LAYER), made.block_tables, seq_ids, *made[4:7]
    return (jnp.asarray(queries, dtype), *pools, *rest), options


@functools.cache
def jitted(implementation):
    attend = functools.partial(paged_attention, implementation=implementation)
    return jax.jit(attend, static_argnames="kv_dtype")


def rows_of(batch):
    """Return the rows of the prompt, a mask."""
    requests, number = BATCHES[batch]
    rows = np.zeros(NUM_ROWS, bool)
    if number is not None:
        start = sum(length for length, _ in requests[:number])
        rows[start : start + requests[number][0]] = True
    return rows


# A window that masks nothing: all windows share a program.
WIDE = 2**30


@pytest.mark.parametrize(
    "batch, window, goes",
    few(
        [
            *(
                (name, WIDE, number is not None)
                for name, (_, number) in BATCHES.items()
            ),
            ("one behind others", 30, True),
            ("one behind others", 29, False),
        ],
        ("one behind others", WIDE, True),
    ),
)
def test_prompts_equal_the_reference(batch, window, goes):
    given, options = operands_of(batch)
    options["window"] = np.int32(window)
    wanted = jitted("reference")(*given, **options)
    found = jitted("prompts")(*given, **options)
    assert_close(found, wanted)
    # Wrong numbers appear only in the prompt's rows.
    rows = rows_of(batch) if goes else np.zeros(NUM_ROWS, bool)
    wrong = jitted("sevens")(*given, **options)
    assert np.all(np.asarray(wrong[rows]) == 7.0)
    assert_close(wrong[~rows], wanted[~rows])
    assert is_close(wrong, wanted) == (not goes)


STORED = [("bfloat16", "bfloat16")]
OTHERS = [
    ("float16", "int8"),
    ("float16", "float16"),
    ("bfloat16", "float32"),
    ("bfloat16", "float8_e4m3fn"),
]


@pytest.mark.parametrize("dtype, kv_dtype", [*STORED, *further(OTHERS)])
def test_prompts_read_the_stored_encoding(dtype, kv_dtype):
    given, options = operands_of("one behind others", dtype=dtype, kv_dtype=kv_dtype)
    wanted = jitted("reference")(*given, **options)
    found = jitted("prompts")(*given, **options)
    assert found.dtype == wanted.dtype
    # Keys and values are rounded to the queries' dtype, unlike the reference.
    error = np.abs(np.asarray(found, np.float64) - np.asarray(wanted, np.float64))
    assert np.max(error) <= 2 * TOLERANCE[dtype]
    assert np.max(np.abs(np.asarray(wanted, np.float64))) > 1.0


@pytest.mark.one_end
def test_prompt_gradients_equal_paged_attention():
    given, options = operands_of("one before others")
    # Missing entries are NaN, and 0 * NaN is NaN.
    arrays = [jnp.nan_to_num(each) for each in given[:3]]

    def differentiate(implementation):
        def weigh(*arrays):
            output = paged_attention(
                *arrays, *given[3:], implementation=implementation, **options
            )
            return jnp.sum(jnp.sin(output))

        return jax.jit(jax.grad(weigh, argnums=(0, 1, 2)))(*arrays)

    pairs = zip(differentiate("sevens"), differentiate(None), strict=True)
    for found, wanted in pairs:
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.further
def test_the_kernel_skips_the_rows_of_a_prompt():
    """Interpreted; the decode rows beside it are unchanged."""
    call = make_call("one behind others")
    rest = without_prompt(call, find_prompt(call))
    assert rest.requests.query_lengths.tolist() == [1, 0, 0, 1]
    output, lse = jax.jit(lambda rest: Pallas().attend(rest, DeviceType("cpu", None)))(
        rest
    )
    rows = rows_of("one behind others")
    assert np.all(np.asarray(output[rows]) == 0) and np.all(np.isneginf(lse[rows]))
    given, options = operands_of("one behind others")
    wanted = jitted("reference")(*given, **options)
    assert_close(output[~rows], wanted[~rows])


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_non_finite_values_do_not_affect_earlier_rows(number):
    """A non-finite key or value affects only later rows of the prompt."""
    given, options = operands_of("one behind others")
    whole = np.asarray(jitted("prompts")(*given, **options))
    table, token = given[4][2], 17  # of the prompt, which starts at the second row
    for which in (1, 2):
        arrays = [np.array(each) for each in given[:3]]
        arrays[which][LAYER, table[token // 4], 1, token % 4, 5] = number
        found = np.asarray(jitted("prompts")(*arrays, *given[3:], **options))
        sees = np.zeros(found.shape[:2], bool)
        sees[1 + token : 31, 2:] = True
        np.testing.assert_array_equal(found[~sees], whole[~sees])
        assert np.isnan(found[sees]).all()


def make_call(batch):
    """Return the call that `paged_attention` makes from a batch."""
    made = []

    def keep(_choice, call):
        made.append(call)
        return attend_xla(call)

    given, options = operands_of(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice.Choice, "serve", keep)
        paged_attention(*given, **options)
    return made[0]


# cuDNN.

ROWS = 4_096


@pytest.fixture
def has_cudnn(monkeypatch):
    """A fake cuDNN version for JAX's check."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91300)


def lower_cudnn(rows=ROWS, platform="cuda", *, wrap=None, options=None, **shapes):
    """Lower a call in the shapes of Llama 3 8B."""
    queries, pools = make_shapes(rows=rows, **shapes)
    arrays = queries, pools.keys, pools.values, shape(4, 512)
    options = {"kv_dtype": pools.formats.key.dtype, "implementation": "cudnn"} | (
        options or {}
    )

    def attend(queries, keys, values, tables, *lengths):
        return paged_attention(
            queries, keys, values, 1, tables, None, *lengths, **options
        )

    attend = attend if wrap is None else wrap(attend)
    return lower(attend, (*arrays, *(shape(4) for _ in range(3))), platform)


def find_cudnn(lowered):
    """Return the configurations of cuDNN's calls."""
    calls = re.findall(r"@__cudnn\$fmhaSoftmax\(.*", lowered.as_text())
    return [call.replace("\\22", '"') for call in calls]


@pytest.mark.usefixtures("has_cudnn")
def test_cudnn_computes_a_prompt():
    lowered = lower_cudnn()
    calls = find_cudnn(lowered)
    assert len(calls) == 1
    for call in calls:
        assert '"mask_type": "CAUSAL"' in call
        assert '"dimensions": ["1", "32", "4096", "4096"]' in call
        assert f'"fmha_scale": {1 / math.sqrt(128)}' in call
        assert "tensor<1x4096x8x128xbf16>" in call  # unrepeated kv heads
    names = [kernel.name for kernel in find_kernels(lowered)]
    assert names == ["jkv_decode", "jkv_join", "jkv_prefill", "jkv_isolate"]
    # Only kernels and gathers read the pool.
    for line in lowered.as_text().splitlines():
        if "tensor<2x64x8x16x128xui16>" in line and "stablehlo" in line:
            assert "custom_call" in line or "gather" in line or "case" in line, line


@pytest.mark.usefixtures("has_cudnn")
def test_cudnn_in_a_step_of_all_layers():
    """Append, and a scan over layers that write and attend."""
    config = jkv.CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=128,
        num_blocks=512,
        max_sequences=4,
        max_context_length=2 * ROWS,
    )

    def step(cache, lengths, hidden):
        cache, batch = jkv.append(cache, jnp.arange(4), lengths, capacity=ROWS)

        def layer(carry, number):
            cache, hidden = carry
            rows = hidden[:, :2]
            cache = jkv.write(cache, number, batch, rows, rows)
            found = jkv.attend(cache, number, batch, hidden, implementation="cudnn")
            return (cache, found), None

        (cache, hidden), _ = jax.lax.scan(layer, (cache, hidden), jnp.arange(2))
        return jkv.commit(cache, batch), hidden

    given = jax.eval_shape(lambda: jkv.init(config)), shape(4)
    lowered = lower(step, (*given, shape(ROWS, 8, 128, dtype=jnp.bfloat16)), "cuda")
    assert len(find_cudnn(lowered)) == 1


@pytest.mark.usefixtures("has_cudnn")
def test_cudnn_skips_small_steps():
    assert not find_cudnn(lower_cudnn(rows=ROWS - 1))
    decoding = {"max_query_length": 1}
    assert not find_cudnn(lower_cudnn(options=decoding))


@pytest.mark.usefixtures("has_cudnn")
def test_cudnn_on_a_mesh_computes_the_local_heads():
    mesh = mesh_of_cards("cuda", {"heads": 4}, AxisType.Auto)
    pool = P(None, None, "heads")

    def divide(attend):
        return jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(P(None, "heads"), pool, pool, *(P() for _ in range(4))),
            out_specs=P(None, "heads"),
        )

    calls = find_cudnn(lower_cudnn(wrap=divide))
    assert len(calls) == 1
    assert all('"dimensions": ["1", "8", "4096", "4096"]' in call for call in calls)


@pytest.mark.usefixtures("has_cudnn")
@pytest.mark.parametrize("mapped", few([(0, None), (0, 0)], (0, None)))
def test_cudnn_under_vmap_runs_sequentially(mapped):
    queries, rest = mapped

    def map_sequences(attend):
        axes = (queries, None, None, rest, None, None, None)
        return lambda given, *others: jax.vmap(attend, axes)(
            jnp.stack([given, given]),
            *others[:2],
            *(jnp.stack([each] * 2) if rest == 0 else each for each in others[2:3]),
            *others[3:],
        )

    calls = find_cudnn(lower_cudnn(wrap=map_sequences))
    assert len(calls) == 1
    assert all('"dimensions": ["1", "32", "4096", "4096"]' in call for call in calls)


REFUSED = {
    "float32 queries": ({"dtype": "float32"}, {}, "bfloat16 and float16"),
    "latent": ({"head_dim": 576}, {"value_head_dim": 512}, "separate keys and values"),
    "value dim": ({"value_dim": 64}, {}, "one head dim"),
    "head dim": ({"head_dim": 100}, {}, "multiple of 8"),
    "soft cap": ({}, {"soft_cap": 30.0}, "neither soft_cap nor sinks"),
    "sinks": ({}, {"sinks": np.zeros(32, np.float32)}, "neither soft_cap nor sinks"),
    "traced scale": ({}, {"scale": np.float32(0.1)}, "static scale"),
    "log-sum-exp": ({}, {"return_lse": True}, "no float32 log-sum-exp"),
}


@pytest.mark.usefixtures("has_cudnn")
@pytest.mark.parametrize("name", few(REFUSED, "head dim"))
def test_cudnn_refuses_unsupported_calls(name):
    shapes, options, reason = REFUSED[name]
    with pytest.raises(NotImplementedError, match=reason):
        lower_cudnn(options=options, **shapes)


@pytest.mark.usefixtures("has_cudnn")
@pytest.mark.one_end
def test_cudnn_refuses_position_based_splits():
    with pytest.raises(ValueError, match="is not batch-invariant"):
        lower_cudnn(options={"by_position": True})


def test_missing_cudnn_is_reported():
    with pytest.raises(NotImplementedError, match="cuDNN is not detected"):
        lower_cudnn(rows=64)


@pytest.mark.usefixtures("has_cudnn")
def test_cudnn_supports_cuda_only():
    with pytest.raises(NotImplementedError, match="supports CUDA only"):
        lower_cudnn(platform="rocm")


@pytest.mark.usefixtures("has_cudnn")
def test_cudnn_is_the_default_for_long_prompts():
    long = {"implementation": None}
    assert len(find_cudnn(lower_cudnn(options=long))) == 1
    # Neither for small steps, nor for calls by position or with a log-sum-exp.
    assert not find_cudnn(lower_cudnn(rows=ROWS - 1, options=long))
    assert not find_cudnn(lower_cudnn(options=long | {"by_position": True}))
    assert not find_cudnn(lower_cudnn(options=long | {"return_lse": True}))
    assert not find_cudnn(lower_cudnn(options=long | {"soft_cap": 5.0}))


@pytest.mark.usefixtures("has_cudnn")
def test_the_default_has_a_derivative_without_cudnn():
    def differentiate(call):
        return lambda *arrays: jax.grad(lambda q: call(q, *arrays[1:]).sum())(arrays[0])

    options = {"implementation": None}
    assert not find_cudnn(lower_cudnn(wrap=differentiate, options=options))

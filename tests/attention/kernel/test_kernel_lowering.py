"""Programs of the kernel for absent GPUs: lowering, addresses, export."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention.kernel_lowering import (
    find_kernels,
    lower,
    lower_kernels,
    make_shapes,
    pretend,
    shape,
)
from support.jax_versions import dealt, few, with_further
from support.tolerances import assert_close, is_close

import jkv
from jkv.attention import paged_attention
from jkv.attention.backend import find_target
from jkv.attention.kernel.tiles.table import TABLE
from jkv.attention.kernel.tiles.tuning import (
    find_family,
    find_kind,
    find_tuning,
    why_never,
    why_not,
)

ROWS = [
    (family, number, kind)
    for family in TABLE
    for number, row in enumerate(TABLE[family].rows)
    for kind in row.kinds
]
# Dtypes with which each kind of call is lowered.
DTYPES = {
    "half": {},
    "float32": {"dtype": "float32"},
    "byte": {"kv_dtype": "float8_e4m3fn"},
    "four": {"kv_dtype": "int8", "value_dtype": "int4"},
    "mixed": {"dtype": "float32", "kv_dtype": "int8"},
}


def platforms_of(family):
    return {
        "cuda" if target.startswith("sm_") else "rocm"
        for target in TABLE[family].targets
    }


# Rows of a family differ in head dims and tiles: run every fourth one here.
FURTHER = [row for row in ROWS if row[1] % 4]


@pytest.mark.parametrize(
    "family, number, kind", dealt(with_further(ROWS, *FURTHER), turn=5, share=8)
)
def test_every_row_of_the_table_lowers(family, number, kind):
    row = TABLE[family].rows[number]
    queries, pools = make_shapes(row.max_head_dim, group=16, **DTYPES[kind])
    assert find_kind(queries, pools) == kind
    tuning = row.tuned_for(TABLE[family].units)
    options = {
        "window": shape(),
        "soft_cap": 30.0,
        "sinks": shape(queries.shape[1], dtype=jnp.float32),
    }
    (platform,) = platforms_of(family)
    lowered = lower_kernels(queries, pools, tuning, platform, **options)
    kernels = find_kernels(lowered)
    names = [kernel.name for kernel in kernels]
    assert names == ["jkv_decode", "jkv_join", "jkv_prefill", "jkv_isolate"]
    decode, join, prefill, isolate = kernels
    decodes = tuning.decode_tile(options["soft_cap"])
    tiles = (decode, decodes), (prefill, row.prefill), (isolate, row.prefill)
    for kernel, tile in tiles:
        assert kernel.num_warps == tile.num_warps
        stages = 1 if kernel is isolate else tile.num_stages  # it rarely runs
        assert kernel.num_stages == stages
        assert kernel.text.count("tt.dot") >= 2
    kv_heads = pools.keys.shape[2]
    assert decode.grid[0] % kv_heads == 0 and join.grid[:2] == (64, queries.shape[1])
    # The whole pool is an operand: nothing else reads it.
    pool = "x".join(map(str, pools.keys.shape))
    for line in lowered.as_text().splitlines():
        if f"tensor<{pool}x" in line and "stablehlo" in line:
            assert "custom_call" in line, line


@pytest.mark.one_end
def test_a_decode_step_launches_no_prefill_kernel():
    queries, pools = make_shapes()
    tuning = find_tuning(queries, pools, "rocm", "gfx942")
    lowered = lower_kernels(queries, pools, tuning, "rocm", max_query_length=1)
    names = [kernel.name for kernel in find_kernels(lowered)]
    assert names == ["jkv_decode", "jkv_join"]


@pytest.mark.parametrize(
    "blocks, bits", few([(2**15, 32), (2**16, 32), (2**16 + 1, 64)], (2**16 + 1, 64))
)
def test_addresses_past_two_to_the_31_are_64_bits(blocks, bits):
    """2**15 elements a block: 2**31 elements are 2**16 blocks, the most for 32 bits."""
    queries, pools = make_shapes(blocks=blocks, num_layers=2)
    assert pools.keys.size == blocks * 2**15
    tuning = find_tuning(queries, pools, "rocm", "gfx942")
    assert why_not(queries, pools, "rocm", "gfx942") is None
    kernels = find_kernels(lower_kernels(queries, pools, tuning, "rocm"))
    for kernel in kernels:
        if kernel.name == "jkv_join":
            continue
        # The offsets of both pools, and of the smaller queries.
        offsets = re.findall(
            r"addptr.*: \(tensor<[^<]*!tt.ptr<b?[fi]16[^>]*>>, tensor<[\dx]+x(i\d+)>",
            kernel.text,
        )
        assert offsets.count(f"i{bits}") >= 2
        assert set(offsets) == {"i32", f"i{bits}"}


@pytest.mark.one_end
def test_byte_pools_of_two_to_four_gib_are_refused():
    """2**31 < elements and bytes <= 2**32: 32-bit offsets would wrap around."""
    for blocks, refused in (
        (2**16, False),
        (2**16 + 1, True),
        (2**17, True),
        (2**17 + 1, False),
    ):
        reason = why_never(*make_shapes(blocks=blocks, kv_dtype="int8"))
        assert ("would address" in (reason or "")) == refused


@pytest.mark.one_end
def test_gpus_belong_to_families():
    expected = {
        ("rocm", "gfx90a"): "cdna",
        ("rocm", "gfx942"): "cdna",
        ("rocm", "gfx950"): "cdna4",
        ("rocm", "gfx1100"): "rdna",
        ("rocm", "gfx1151"): "rdna",
        ("rocm", "gfx1201"): "rdna4",
        ("rocm", "gfx1250"): "rdna",
        ("rocm", "gfx1030"): None,  # no matrix instructions
        ("rocm", "gfx906"): None,
        ("rocm", None): "rdna",
        ("cuda", "sm_90"): "hopper",
        ("cuda", "sm_80"): "other",
        ("cuda", "sm_100"): "other",
        ("cuda", "sm_75"): None,
        ("cuda", None): "other",
    }
    assert {key: find_family(*key) for key in expected} == expected
    if jax.default_backend() == "cpu":
        assert find_target("rocm") is None and find_target("cuda") is None


@pytest.mark.one_end
def test_missing_table_rows_are_reported():
    float32 = make_shapes(dtype="float32")
    assert why_not(*float32, "rocm", "gfx942") is None
    for card in ("gfx1100", "gfx1201"):
        assert f"head dim 128 with float32 on {card}" in why_not(*float32, "rocm", card)
    assert "an unknown rocm GPU" in why_not(*float32, "rocm", None)
    assert "head dim 128 with float32 on sm_80" in why_not(*float32, "cuda", "sm_80")
    assert "an unknown cuda GPU" in why_not(*float32, "cuda", None)
    wide_bytes = why_not(*make_shapes(256, kv_dtype="int8"), "rocm", "gfx1100")
    assert "head dim 256 with bfloat16 and int8 on gfx1100" in wide_bytes
    latent = make_shapes(576)
    assert why_not(*latent, "rocm", "gfx90a") is None
    assert "head dim 576" in why_not(*latent, "rocm", "gfx1201")
    assert why_not(*make_shapes(), "cuda", None) is None


def call_shapes(dtype):
    """Return a call of `paged_attention` on float pools, as shapes."""
    pool = shape(2, 64, 8, 16, 128, dtype=dtype)
    rows = shape(4, 32, 128, dtype=dtype)
    numbers = [shape(4) for _ in range(3)]
    return rows, pool, pool, shape(), shape(4, 16), None, *numbers


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
@pytest.mark.one_end
def test_the_platform_selects_the_backend(platform):
    """The kernel if the table has a row for any GPU, else the plain path."""
    lowered = lower(paged_attention, call_shapes("float16"), platform)
    assert len(find_kernels(lowered)) == 4
    lowered = lower(paged_attention, call_shapes("float32"), platform)
    assert not find_kernels(lowered)


@pytest.mark.one_end
@pytest.mark.interpreted(reason="it lowers for cards that are not here")
def test_a_forced_kernel_raises_if_unsupported():
    """At lowering, or at tracing if the GPU is known by then."""
    forced = functools.partial(paged_attention, implementation="pallas")
    assert len(find_kernels(lower(forced, call_shapes("float16"), "cuda"))) == 4
    for platform, reason in (("cuda", "no tile for"), ("tpu", "CUDA only")):
        with pytest.raises(NotImplementedError, match=reason):
            lower(forced, call_shapes("float32"), platform)


def test_vmap_lowers_and_equals_a_loop():
    """A GPU launches them one after another; here the kernel is only lowered."""
    queries, keys, values, *rest = (
        leaf if leaf is None else jnp.ones(leaf.shape, leaf.dtype)
        for leaf in call_shapes("float16")
    )
    many = jnp.stack([queries, 2 * queries])
    numbers = jnp.arange(64, dtype=jnp.float16)[None, :, None, None, None]
    values = values * numbers
    # Sequence i reads block i + 1.
    rest[1] = jnp.arange(1, 65, dtype=jnp.int32).reshape(16, 4).T
    rest[3] = jnp.arange(4, dtype=jnp.int32)

    def attend(queries):
        return paged_attention(queries, keys, values, *rest)

    output = jax.vmap(attend)(many)
    for one, alone in zip(output, many, strict=True):
        assert_close(one, attend(alone))
        assert np.asarray(one).any()
    lowered = lower(jax.vmap(attend), (shape(*many.shape, dtype=jnp.float16),), "rocm")
    assert len(find_kernels(lowered)) == 4


def test_only_the_known_warning_is_silenced():
    lower(paged_attention, call_shapes("float16"), "rocm")  # warnings are errors
    with pytest.raises(DeprecationWarning):
        warnings.warn("The Pallas backend is old", DeprecationWarning, stacklevel=1)


def test_a_step_is_exported_for_three_platforms():
    """append, write and attend over layers: serialized, read back, run on a CPU."""
    config = jkv.CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=64,
        num_blocks=8,
        block_size=16,
        max_sequences=2,
        max_context_length=64,
    )
    cache, opened = jkv.allocate(jkv.init(config), [0, 0])
    leaves, structure = jax.tree.flatten(cache)

    def step(leaves, rows):
        cache = jax.tree.unflatten(structure, leaves)
        cache, batch = jkv.append(cache, opened.seq_ids)
        outputs = []
        for layer in range(2):
            keys = rows[layer, :, :2]
            cache = jkv.write(cache, layer, batch, keys, keys)
            outputs.append(jkv.attend(cache, layer, batch, rows[layer]))
        return jax.tree.leaves(cache), jnp.stack(outputs)

    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.standard_normal((2, 2, 8, 64)), jnp.bfloat16)
    kernel_call = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    with pretend("rocm"):
        exported = jax.export.export(
            jax.jit(step),
            platforms=("cpu", "rocm", "cuda"),
            disabled_checks=[kernel_call],
        )(leaves, rows)
    assert exported.mlir_module().count("xla.gpu.triton") >= 2 * 3
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cpu", "rocm", "cuda")

    for number in (1, 2):
        new_leaves, expected = step(leaves, rows * number)
        called_leaves, found = again.call(leaves, rows * number)
        assert_close(found, expected)
        assert not is_close(jnp.zeros_like(found), expected)
        for one, other in zip(called_leaves, new_leaves, strict=True):
            np.testing.assert_array_equal(one, other)
        leaves = new_leaves

"""jkv's own lowering: equality with Pallas', use without it, and refusals."""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.attention.kernel_lowering import (
    PALLAS,
    find_kernels,
    lower,
    lower_derivative,
    lower_kernels,
    make_shapes,
    shape,
    written_for,
)
from support.attention.slot_writes import Sizes, shape_write
from support.jax_versions import few

from jkv.attention import paged_attention
from jkv.attention.kernel import backend
from jkv.attention.kernel.interface import Pallas, Triton
from jkv.attention.kernel.launches.slots import store_rows
from jkv.attention.kernel.tiles.tuning import find_backward, find_tuning


def lower_call(platform, target, way, *, head_dim=128, options="all", **fields):
    """Lower a call with all options, in tiles for a GPU."""
    queries, pools = make_shapes(head_dim, **fields)
    tuning = find_tuning(queries, pools, platform, target)
    given = {}
    if options == "all":
        sinks = shape(queries.shape[1], dtype=jnp.float32)
        given = {"window": shape(), "soft_cap": 30.0, "sinks": sinks}
    return lower_kernels(queries, pools, tuning, platform, way=way, **given)


def lower_gradients(platform, target, way):
    queries, pools = make_shapes(64, dtype="float32", has_bits=False, block_size=24)
    tuning = find_backward(queries, pools, platform, target)
    return lower_derivative(queries, pools, tuning, platform, way=way)


def lower_store(platform, _target, way):
    write = shape_write(Sizes(dtype="int8", head_dims=(72, 72), part=1))
    return lower(functools.partial(store_rows, way=way), (write,), platform)


PROGRAMS = {
    "bytes": (functools.partial(lower_call, kv_dtype="int8", group=12), "gfx942"),
    "words": (functools.partial(lower_call, kv_dtype="int8", head_dim=64), "sm_90"),
    "latent": (functools.partial(lower_call, head_dim=576, options=None), "gfx950"),
    "beyond 4 GiB": (
        functools.partial(lower_call, blocks=2**16 + 1, options=None),
        "gfx942",
    ),
    "floats": (functools.partial(lower_call, dtype="float32", head_dim=96), "sm_90"),
    "derivative": (lower_gradients, "gfx942"),
    "store": (lower_store, "gfx1100"),
}


def call_shapes(num_rows):
    """Return a call of `paged_attention` on float pools, as shapes."""
    pool = shape(2, 64, 8, 16, 128, dtype=jnp.float16)
    rows = shape(num_rows, 32, 128, dtype=jnp.float16)
    numbers = [shape(4) for _ in range(3)]
    return rows, pool, pool, shape(), shape(4, 16), None, *numbers


def without_modules(lowered):
    """Return a program's text without Triton modules (bytecode in Pallas)."""
    return re.sub(r'ir = "(?:[^"\\]|\\.)*"', "", lowered.as_text())


@pytest.mark.parametrize("name", few(PROGRAMS, "bytes", "floats", "store"))
def test_programs_equal_those_of_pallas(name):
    """Modules byte for byte, grids, warps, operands, layouts and aliases.

    `test_kernel_every_module.py` compares the modules of the whole table.
    """
    lower_one, target = PROGRAMS[name]
    platform = "cuda" if target.startswith("sm_") else "rocm"
    expected = lower_one(platform, target, PALLAS)
    found = lower_one(platform, target, written_for(platform))
    kernels = find_kernels(expected)
    assert find_kernels(found) == kernels and len(kernels) >= 1
    assert without_modules(found) == without_modules(expected)
    assert len(without_modules(found)) < len(found.as_text())


@pytest.mark.one_end
@pytest.mark.interpreted(reason="it lowers for cards that are not here")
def test_sharded_arrays_do_not_change_modules():
    """JAX puts the arrays' shardings into jaxprs, including those of kernels."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("tp",))
    lie = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lie), call_shapes(7)
    )
    expected, found = (
        find_kernels(
            lower(
                functools.partial(paged_attention, implementation=name),
                arguments,
                "rocm",
            )
        )
        for name in ("pallas", "triton")
    )
    assert found == expected and len(found) == 4


def launch_toy(kernel, way, *arrays, grid=(3, 2)):
    """Run a kernel and return its only result, f32[8, 16]."""
    results = (jax.ShapeDtypeStruct((8, 16), jnp.float32),)
    compilation = backend.Compilation(1, 1, way)
    (out,) = backend.launch(
        "toy", kernel, arrays, results, grid=grid, compilation=compilation
    )
    return out


def lower_toy(kernel, platform, way, *dtypes, grid=(3, 2)):
    arrays = [shape(8, 16, dtype=dtype) for dtype in dtypes]
    launch = functools.partial(launch_toy, kernel, way, grid=grid)

    def defer(*arrays):
        results = jax.ShapeDtypeStruct((8, 16), jnp.float32)
        return backend.defer(launch, arrays, results, way)

    return lower(defer, arrays, platform)


# Primitives on two tiles.
OF_ALL = "add sub mul max min eq ne lt le gt ge".split()
OF_INTEGERS = "div rem bitwise_and bitwise_or bitwise_xor".split()
OF_INTEGERS += "shift_left shift_right_arithmetic shift_right_logical".split()
INTEGERS = "int8 int16 int32 uint8 uint16 uint32".split()
FLOATS = "float16 bfloat16 float32".split()
COLUMNS = 16


def index_all():
    """Return the indices of a ref [8, 16], as kernels compute them."""
    iota = functools.partial(lax.broadcasted_iota, jnp.int32)
    return iota((8, 1), 0), iota((1, COLUMNS), 1)


def keep(out_ref, *tiles):
    """Store the sum of tiles, so that each is computed."""
    total = jnp.zeros((8, COLUMNS), jnp.float32)
    for tile in tiles:
        total += tile.astype(jnp.float32)
    backend.store_masked(out_ref, index_all(), total, total > 0.0)


def operate(x_ref, y_ref, out_ref):
    """Apply each operation to two tiles, and to a tile and a number."""
    x, y = x_ref[index_all()], y_ref[index_all()]
    names = OF_ALL + (OF_INTEGERS if x.dtype.name in INTEGERS else [])
    tiles = [getattr(lax, name)(x, y) for name in names]
    tiles += [x + 1, 2 * y, jnp.where(x > 0, x, 3), jnp.where(x < y, 4, y)]
    keep(out_ref, *tiles)


def convert(x_ref, out_ref):
    """Convert between numbers of every kind."""
    x = x_ref[index_all()]
    tiles = [x, x > 0, (x != 0).astype(jnp.int8)]
    for name in FLOATS + (INTEGERS if x.dtype.name in INTEGERS else []):
        tiles.append(x.astype(name))
    keep(out_ref, *tiles)


def reshape_and_sum(x_ref, out_ref):
    """Apply the kernels' operations to float32 tiles and to numbers."""
    x, row = x_ref[index_all()], x_ref[backend.program_id(1), jnp.arange(16)]
    bits = lax.bitcast_convert_type(x, jnp.int32)
    number = jnp.max(row) + lax.squeeze(jnp.sum(row[None, :], axis=1), [0])
    is_above = lax.squeeze((row > 0.0)[None, :], [0])
    sums = jnp.min(bits, axis=0)[None, :] + jnp.sum(bits, axis=1)[:, None]
    halves = lax.concatenate([x[..., None], x[..., None]], 2).reshape(8, 32)
    product = lax.dot_general(
        *(halves.astype(jnp.float16),) * 2,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    functions = [jnp.exp2(x), jnp.log2(x), jnp.abs(x), -x, jnp.sign(bits)]
    numbers = jnp.max(jnp.max(product, axis=1)) + number
    keep(out_ref, sums, *functions, jnp.where(is_above[None, :], numbers, x))


def loop(x_ref, out_ref):
    """Run counting and other loops, with refs, with and without results."""
    number = 5 + backend.program_id(0)

    def add(count, total):
        return total + x_ref[index_all()] * count.astype(jnp.float32)

    def store(count, _):
        out_ref[count, count] = number.astype(jnp.float32)

    def halve(carry):
        steps, total = carry
        inner = lax.fori_loop(steps, number, add, total)
        return steps >> 1, inner + x_ref[index_all()]

    def count_up(first, step, end):
        """Run a loop whose counts `scf.for` does not support."""
        carry = first, end, jnp.float32(1.0)
        found = lax.while_loop(
            lambda c: c[0] < c[1], lambda c: (c[0] + step, c[1], c[2] * 2.0), carry
        )
        return found[2]

    total = lax.fori_loop(0, number, add, jnp.zeros((8, COLUMNS), jnp.float32))
    total += count_up(jnp.float32(0), 1, number.astype(jnp.float32))
    total += count_up(jnp.uint32(0), jnp.uint32(1), number.astype(jnp.uint32))
    total += count_up(jnp.int32(0), 2, number)
    lax.fori_loop(jnp.int32(1), number, store, None)
    limit = number - 3
    _, total = lax.while_loop(lambda c: c[0] > limit, halve, (number, total))
    keep(out_ref, total)


TOYS = {
    **{f"{name}s": (operate, name, name) for name in [*INTEGERS, *FLOATS]},
    **{f"{name} converted": (convert, name) for name in [*INTEGERS, *FLOATS]},
    "tiles": (reshape_and_sum, "float32"),
    "loops": (loop, "float32"),
}


@pytest.mark.parametrize("name", few(TOYS, "uint8s", "tiles", "loops"))
def test_rules_equal_those_of_pallas(name):
    kernel, *dtypes = TOYS[name]
    for platform, grid in (("rocm", (3, 2)), ("cuda", (1, 5))):
        expected, found = (
            find_kernels(lower_toy(kernel, platform, way, *dtypes, grid=grid))
            for way in (PALLAS, written_for(platform))
        )
        assert found == expected
        assert len(found[0].text.splitlines()) > 40


def refuse(x_ref, out_ref, *, what):
    def multiply(dtype):
        precision = lax.Precision.HIGHEST if dtype == jnp.int32 else None
        x = x_ref[index_all()]
        numbers = (((1,), (1,)), ((), ()))
        found = lax.dot_general(
            x, x, numbers, precision=precision, preferred_element_type=dtype
        )
        return found[:, :1]

    keep(
        out_ref,
        {
            "a slice": lambda: x_ref[0:8, index_all()[1][0]],
            "a sine": lambda: jnp.sin(x_ref[index_all()].astype(jnp.float32)),
            "a number cut off": lambda: x_ref[index_all()].astype(jnp.int32),
            "two axes": lambda: jnp.sum(x_ref[index_all()]),
            "a rounded product": lambda: multiply(jnp.float32),
            "a product of bytes": lambda: multiply(jnp.int32),
            "bits of another width": lambda: jnp.max(
                lax.bitcast_convert_type(x_ref[index_all()], jnp.int16), axis=2
            ),
            "three rows": lambda: jnp.sum(
                x_ref[jnp.arange(3)[:, None], index_all()[1]]
            ),
        }[what](),
    )


@pytest.mark.one_end
@pytest.mark.parametrize(
    "what, dtype, message",
    [
        ("a slice", "float32", "brings get to Triton .*got a slice"),
        ("a sine", "float32", "brings sin to Triton"),
        ("a number cut off", "float32", "brings convert_element_type to Triton"),
        ("a sine", "bool", "support no boolean operands"),
        ("a sine", "float8_e5m2", "do not compute with float8_e5m2"),
        ("three rows", "float32", "brings get to Triton .*power of two"),
        ("two axes", "float32", "brings reduce_sum to Triton"),
        ("a rounded product", "float32", "brings dot_general to Triton"),
        ("a product of bytes", "int8", "brings dot_general to Triton .not "),
        (
            "bits of another width",
            "float32",
            "brings bitcast_convert_type to Triton .not ",
        ),
    ],
)
def test_primitives_without_a_rule_are_reported(what, dtype, message):
    kernel = functools.partial(refuse, what=what)
    with pytest.raises(NotImplementedError, match=f"(?s){message}"):
        lower_toy(kernel, "rocm", written_for("rocm"), dtype)


@pytest.mark.one_end
def test_triton_is_selected_if_pallas_is_missing(monkeypatch):
    """The change for that day: `default_platforms` moves to another class."""
    monkeypatch.setattr(Pallas, "_why_missing", lambda *_: "it is gone")
    assert not find_kernels(lower(paged_attention, call_shapes(5), "rocm"))
    monkeypatch.setattr(Triton, "default_platforms", Pallas.default_platforms)
    # Another shape, as traces are cached.
    assert len(find_kernels(lower(paged_attention, call_shapes(6), "rocm"))) == 4


WITHOUT = """
import sys
for name in ("jax.experimental.pallas", "jax._src.pallas", "jax._src.lib", "jaxlib"):
    sys.modules[f"{name}.triton"] = None  # importing it raises
import functools
import jax
import jax.numpy as jnp
import jkv
pool = jnp.arange(128.0, dtype=jnp.bfloat16).reshape(2, 1, 4, 16)
numbers = [jnp.array([n]) for n in (0, 1, 5)]
rows = jnp.ones((1, 1, 16), jnp.bfloat16)
call = [rows, pool, pool, None, jnp.array([[1, 0]]), None, *numbers]
expected = jkv.paged_attention(*call)
try:
    jkv.paged_attention(*call, implementation="pallas")
except NotImplementedError as error:
    assert "no Pallas backend" in str(error), error
else:
    raise AssertionError("not refused")
named = functools.partial(jkv.paged_attention, implementation="triton")
assert jnp.allclose(named(*call), expected, rtol=0.02), (named(*call), expected)
for platform in ("rocm", "cuda"):  # no card is asked for
    lowered = jax.jit(named).trace(*call).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("xla.gpu.triton") == 2, lowered.as_text()
"""


@pytest.mark.further
@pytest.mark.newest_further
def test_kernels_work_without_the_lowering_of_pallas():
    """Kernels are interpreted and lowered, also without Pallas' bindings."""
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)

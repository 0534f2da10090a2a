"""The kernel that stores rows in slots: bit-identical to the scatter, and in place."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention.kernel_lowering import find_kernels, lower, shape
from support.attention.slot_writes import Sizes, make_write, shape_write
from support.jax_versions import few

import jkv
from jkv.attention import backend, choice
from jkv.attention.backend import SlotWrite
from jkv.attention.choice import scatter
from jkv.attention.kernel.backend import Way
from jkv.attention.kernel.launches.slots import store_rows, why_scattered
from jkv.verbs import writing

# Interpreted on a CPU, compiled on a GPU.
here = functools.partial(store_rows, way=Way(jax.default_backend() == "cpu"))
compiled = functools.partial(store_rows, way=Way())


def draw_write(sizes, seed=0):
    """Draw a write of random bits, NaN included, with unique slots and padding."""
    random = np.random.default_rng(seed)

    def draw(dims, dtype):
        width = jnp.dtype(dtype).itemsize
        drawn = random.integers(0, 256, (*dims, width), dtype=np.uint8)
        return jnp.asarray(np.ascontiguousarray(drawn).view(dtype).reshape(dims))

    write = shape_write(sizes)
    arrays, rows = (
        {name: draw(each.shape, each.dtype) for name, each in group.items()}
        for group in (write.arrays, write.rows)
    )
    num_parts = 1 if sizes.part is None else 2
    tokens = sizes.block_size * num_parts
    slots = random.permutation(sizes.blocks * tokens)[: sizes.rows]
    valid = np.arange(sizes.rows) % 3 != 1
    return SlotWrite(
        arrays=arrays,
        rows=rows,
        layer=jnp.int32(1),
        # Rows without a slot have block N, or a block of another row.
        block_ids=jnp.asarray(
            np.where(valid | (slots % 2 == 0), slots // tokens, sizes.blocks), jnp.int32
        ),
        offsets=jnp.asarray(slots % tokens, jnp.int32),
        valid=jnp.asarray(valid),
        part=None if sizes.part is None else jnp.int32(sizes.part),
        formats=write.formats,
    )


def assert_same_bits(found, wanted):
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        bits = f"u{array.dtype.itemsize}"  # as bits, since NaN has many
        pair = np.asarray(found[name]).view(bits), np.asarray(array).view(bits)
        np.testing.assert_array_equal(*pair)


CASES = [
    Sizes(),
    Sizes(head_dims=(72, 24), block_size=3, heads=1),  # repeated columns
    Sizes(head_dims=(576,), heads=1, blocks=9, block_size=1),  # latent
    Sizes(dtype="float8_e4m3fn", head_dims=(16, 16), given="float32"),
    Sizes(dtype="float8_e5m2", head_dims=(32, 72), part=1),
    Sizes(part=0, block_size=5),
    Sizes(rows=1, blocks=1, layers=2),
    Sizes(dtype="float16", head_dims=(72, 24), part=0),
    Sizes(dtype="float32"),
    Sizes(dtype="int8", head_dims=(48,), heads=1, given="float16"),  # latent
    Sizes(dtype="int8", value_dtype="int4", head_dims=(32, 64), given="float32"),
    Sizes(dtype="int4", head_dims=(48,), heads=1, given="float32", part=1),
]


@pytest.mark.parametrize(
    "sizes", few(CASES, CASES[0], CASES[4], CASES[7], CASES[10]), ids=str
)
def test_the_kernel_stores_the_same_bits_as_the_scatter(sizes):
    write = draw_write(sizes)
    found, wanted = jax.jit(here)(write), jax.jit(scatter)(write)
    assert_same_bits(found, wanted)
    # Every array of this layer has changed, and nothing of the other one.
    for name, array in write.arrays.items():
        assert (np.asarray(wanted[name][1]) != np.asarray(array[1])).any()
        assert_same_bits({name: found[name][0]}, {name: array[0]})


@pytest.mark.one_end
@pytest.mark.parametrize("layer", [-1, 2, 0])
def test_rows_of_an_invalid_layer_are_dropped(layer):
    write = dataclasses.replace(draw_write(Sizes()), layer=jnp.int32(layer))
    found = jax.jit(here)(write)
    assert_same_bits(found, jax.jit(scatter)(write))
    is_kept = all((found[name] == write.arrays[name]).all() for name in found)
    assert is_kept == (layer != 0)


@pytest.mark.one_end
def test_no_rows():
    write = make_write(Sizes(rows=0), jnp.zeros)
    assert_same_bits(here(write), write.arrays)


LOWERED = [
    ("rocm", Sizes(head_dims=(128, 128), heads=8)),
    ("cuda", Sizes(dtype="int8", head_dims=(64, 64))),
    ("cuda", Sizes(head_dims=(576,), heads=1, part=1)),
    ("rocm", Sizes(dtype="float8_e4m3fn", head_dims=(72, 72))),
    ("rocm", Sizes(dtype="float16", head_dims=(128, 128), heads=8)),
    ("cuda", Sizes(dtype="float32", head_dims=(64, 72))),
]


@pytest.mark.parametrize("platform, sizes", few(LOWERED, LOWERED[0]), ids=str)
def test_one_launch_updates_the_arrays_in_place(platform, sizes):
    write = shape_write(sizes)
    lowered = lower(compiled, (write,), platform)
    (kernel,) = find_kernels(lowered)
    assert kernel.name == "jkv_store"
    assert kernel.grid == (sizes.rows, sizes.heads, 1) and kernel.num_warps == 1
    text = lowered.as_text()
    assert text.count("output_operand_alias<") == len(write.arrays)
    # Numbers are reinterpreted as bits without an operation.
    assert "stablehlo.bitcast_convert" not in text and "stablehlo.convert" not in text


@pytest.mark.one_end
@pytest.mark.parametrize("blocks, bits", [(2**16, 32), (2**16 + 1, 64)])
def test_addresses_past_two_to_the_31_are_64_bits(blocks, bits):
    """2**15 elements a block: 2**31 elements are 2**16 blocks, the most for 32 bits."""
    sizes = Sizes(head_dims=(128, 128), heads=8, block_size=16, blocks=blocks)
    write = shape_write(sizes)
    assert why_scattered(write.arrays) is None
    (kernel,) = find_kernels(lower(compiled, (write,), "rocm"))
    stores = [line for line in kernel.text.splitlines() if '"tt.store"' in line]
    assert len(stores) == 2
    offsets = re.findall(
        r"addptr.*: \(tensor<[^<]*!tt.ptr<i16>>, \S+x(i\d+)>", kernel.text
    )
    assert offsets.count(f"i{bits}") >= 2 and set(offsets) == {"i32", f"i{bits}"}


@pytest.mark.one_end
def test_unsupported_writes_use_scatters():
    def ask(**changes):
        dtype = changes.pop("stored", None)
        write = shape_write(Sizes(**changes))
        arrays = write.arrays
        if dtype is not None:
            arrays = {n: shape(*a.shape, dtype=dtype) for n, a in arrays.items()}
        return why_scattered(arrays) or ""

    assert ask() == ask(dtype="int8") == ask(head_dims=(72, 48)) == ""
    assert ask(stored=jnp.float16) == ask(stored=jnp.float32) == ""
    assert "multiple" in ask(head_dims=(32, 12)) and "multiple" in ask(head_dims=(8, 8))
    assert ask(dtype="int8", head_dims=(32, 16)) == ""
    assert "one launch" in ask(head_dims=(576,))
    assert ask(dtype="int8", head_dims=(576,)) == ""
    # 2**31 < elements and bytes <= 2**32: 32-bit offsets would wrap around.
    large = dict(dtype="int8", head_dims=(128, 128), heads=8, block_size=16)
    for blocks, is_scattered in ((2**16, False), (2**16 + 1, True), (2**17 + 1, False)):
        assert ("2**32" in ask(**large, blocks=blocks)) == is_scattered


@pytest.mark.one_end
def test_gpus_with_a_store_kernel(monkeypatch):
    write = make_write(Sizes(), jnp.zeros)
    monkeypatch.setattr(backend, "find_target", lambda _: None)
    assert choice.find_stores(write) == {}

    def pretend(card):
        found = {"rocm" if card.startswith("gfx") else "cuda": card}
        monkeypatch.setattr(backend, "find_target", found.get)

    for card, found in (
        ("gfx942", ["rocm"]),
        ("gfx1201", ["rocm"]),
        ("sm_90", ["cuda"]),
        ("gfx906", []),  # no kernel
        ("sm_70", []),
    ):
        pretend(card)
        assert list(choice.find_stores(write)) == found, card
    pretend("gfx942")
    floats = make_write(Sizes(head_dims=(8, 8)), jnp.zeros)
    assert choice.find_stores(floats) == {}


CONFIG = jkv.CacheConfig(
    num_layers=3,
    num_kv_heads=2,
    head_dim=16,
    num_blocks=7,
    block_size=3,
    max_sequences=3,
    max_context_length=12,
)


def play(config, queries, keys, values):
    """Take two steps of several sequences and padding, with a loop over layers."""
    cache, opened = jkv.allocate(jkv.init(config), [4, 0, 2])
    for counts in ([2, 0, 3], [1, 1, 1]):
        cache, batch = jkv.append(cache, opened.seq_ids, jnp.array(counts), capacity=8)

        def layer(number, carry, batch=batch):
            cache, rows = carry
            # All exact in bfloat16: XLA may omit intermediate rounding.
            new = jnp.where(jax.lax.stop_gradient(rows) > 0, values, -values)
            power = jnp.asarray(2**number, keys.dtype)
            cache = jkv.write(cache, number, batch, keys * power, new)
            rows = jkv.attend(cache, number, batch, jnp.tile(queries, (1, 2, 1)))
            return cache, rows[:, ::2]

        carry = cache, jnp.zeros_like(values)
        cache, rows = jax.lax.fori_loop(0, config.num_layers, layer, carry)
    return cache, rows


@pytest.mark.newest_further
@pytest.mark.parametrize("dtype", few(["bfloat16", "int8"], "bfloat16"))
def test_a_loop_over_layers_stores_the_same(dtype, monkeypatch):
    """The verb with the interpreted kernel, and without it."""
    config = dataclasses.replace(CONFIG, dtype=dtype)
    random = np.random.default_rng(3)
    rows = [
        jnp.asarray(random.standard_normal((8, 2, 16)), jnp.bfloat16) for _ in range(3)
    ]
    launched = []

    def find_stores(write):
        assert why_scattered(write.arrays) is None
        launched.append(1)
        return dict.fromkeys(("cpu", "rocm", "cuda"), here)

    monkeypatch.setattr(writing, "find_stores", find_stores)
    step = functools.partial(play, config)
    by_kernel, output = jax.jit(step)(*rows)
    assert launched
    launched.clear()
    monkeypatch.setenv(writing.WRITE_SWITCH, "0")
    wanted, wanted_output = jax.jit(functools.partial(step))(*rows)
    assert not launched
    jkv.check(by_kernel)
    assert_same_bits(by_kernel.storage[0].arrays, wanted.storage[0].arrays)
    np.testing.assert_array_equal(np.asarray(output), np.asarray(wanted_output))
    assert np.asarray(output).any()


@pytest.mark.one_end
def test_gradients_pass_the_store_kernel(monkeypatch):
    """Gradients of queries, through a loop over layers that stores bits."""
    monkeypatch.setattr(writing, "find_stores", lambda _: {"rocm": compiled})
    config = dataclasses.replace(CONFIG, num_layers=2, block_size=4)
    random = np.random.default_rng(4)
    rows = [
        jnp.asarray(random.standard_normal((8, 2, 16)), jnp.bfloat16) for _ in range(3)
    ]

    def weigh(queries):
        return jnp.sum(play(config, queries, *rows[1:])[1].astype(jnp.float32) ** 2)

    found = jax.jit(jax.grad(weigh))(rows[0])
    assert np.isfinite(np.asarray(found, np.float32)).all() and np.asarray(found).any()


class WithStore:
    """A differentiable float32 write, with the kernel or with scatters."""

    def __init__(self, stores):
        self.stores = stores
        self.write = draw_write(Sizes(dtype="float32", head_dims=(16, 24)))

    def __call__(self, numbers):
        arrays, rows = numbers
        write = dataclasses.replace(self.write, arrays=arrays, rows=rows)
        return choice.store(write, self.stores)

    def weigh(self, numbers):
        return sum(jnp.sum(jnp.sin(array)) for array in self(numbers).values())


def draw_numbers(shapes, seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(random.standard_normal(x.shape), x.dtype), shapes
    )


DERIVATIVES = {
    "forward": lambda stored: lambda *pair: jax.jvp(stored, pair[:1], pair[1:]),
    "reverse": lambda stored: lambda x, _: jax.grad(stored.weigh)(x),
    "remat": lambda stored: lambda x, _: jax.grad(jax.checkpoint(stored.weigh))(x),
    "many": lambda stored: (
        lambda *pair: jax.vmap(jax.value_and_grad(stored.weigh))(
            jax.tree.map(lambda *each: jnp.stack(each), *pair)
        )
    ),
}


@pytest.mark.parametrize("kind", few(DERIVATIVES, "forward", "many"))
def test_store_derivatives_equal_the_scatter(kind):
    """Derivatives of arrays and rows with respect to the stored values."""
    stored = WithStore(dict.fromkeys(("cpu", "rocm", "cuda"), here))
    numbers = stored.write.arrays, stored.write.rows
    pair = draw_numbers(numbers, 0), draw_numbers(numbers, 1)
    differentiate = DERIVATIVES[kind]
    found = jax.jit(differentiate(stored))(*pair)
    wanted = jax.jit(differentiate(WithStore({})))(*pair)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    # Both arrays and rows have a nonzero derivative.
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(wanted))


@pytest.mark.one_end
def test_differentiated_writes_use_scatters():
    """An undifferentiated program uses the kernel, also for several writes."""
    stored = WithStore({"rocm": compiled})
    numbers = stored.write.arrays, stored.write.rows
    functions = {
        "plain": (stored, 1),
        "other": (
            lambda x: jax.grad(lambda y: jnp.sum(y * stored(x)["key_pool"]))(2.0),
            1,
        ),
        "gradient": (jax.grad(stored.weigh), 0),
        "values alone": (
            jax.grad(
                lambda rows: stored.weigh(
                    (numbers[0], numbers[1] | {"value_pool": rows})
                )
            ),
            0,
        ),
    }
    for name, (function, num_kernels) in functions.items():
        given = numbers[1]["value_pool"] if name == "values alone" else numbers
        assert len(find_kernels(lower(function, (given,), "rocm"))) == num_kernels, name

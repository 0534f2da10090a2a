"""Decoding in one launch: the bits of two, whichever program comes last."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention_workloads import Workload, make_operands
from support.jax_versions import with_further
from support.kernel_lowering import find_kernels, lower, make_call, make_shapes
from test_pallas import BATCHES, CASES

from jkv.attention import choice, paged_attention
from jkv.attention.kernel import backend, platforms
from jkv.attention.kernel.launches import attend_kernel
from jkv.attention.kernel.one_launch import LAUNCH_SWITCH, is_one_launch_asked
from jkv.attention.kernel.platforms import find_kernel, why_two_launches
from jkv.attention.kernel.tuning import find_tuning

# In programs enough that contexts have several pieces.
TUNING = dataclasses.replace(platforms._INTERPRETED, programs=200)
# Which program runs as the n-th: number `n * factor + offset` of all of them.
ORDERS = {"backwards": (-1, -1), "scattered": (37, 5)}


@pytest.fixture
def compile_call(monkeypatch):
    """Return what compiles a call of `paged_attention`, in one launch or in two.

    The programs of one launch run in an order that is given, as a factor and an offset.
    What is compiled for it also returns the counters as they are left.
    """

    def compile_call(function, arguments, *, order=None, tuning=TUNING):
        grid = []

        def run(call):
            call = dataclasses.replace(call, is_in_one_launch=order is not None)
            return attend_kernel(call, tuning=tuning, interpret=True)

        def launch(name, kernel, operands, results, **options):
            grid[:] = options["grid"]
            if order is None or name != "jkv_decode":
                return backend_launch(name, kernel, operands, results, **options)

            # Each program copies the counters: the copy is what the last one leaves.
            def kernel_and_copy(*refs):
                *refs, copy_ref = refs
                kernel(*refs)
                copy_ref[...] = refs[3][...]

            copy = jax.ShapeDtypeStruct(operands[3].shape, jnp.int32)
            *found, copied = backend_launch(
                name, kernel_and_copy, operands, (*results, copy), **options
            )
            counters.append(copied)
            return found

        def program_id(axis):
            number = backend_program_id(axis)
            if order is None or axis:
                return number
            factor, offset = order
            assert np.gcd(factor, grid[0]) == 1
            return jnp.remainder(number * factor + offset, grid[0])

        def call(*arguments):
            return *function(*arguments), *counters

        counters: list[jax.Array] = []
        with monkeypatch.context() as patched:
            backend_launch, backend_program_id = backend.launch, backend.program_id
            patched.setattr(backend, "launch", launch)
            patched.setattr(backend, "program_id", program_id)
            patched.setattr(choice, "choose", lambda *_, **__: run)
            return jax.jit(call).lower(*arguments).compile()

    return compile_call


def assert_same_bits(one, two, arguments):
    """What one launch gives is what two give, and its counters are zeros again."""
    *found, counters = jax.device_get(one(*arguments))
    for each, wanted in zip(found, jax.device_get(two(*arguments)), strict=True):
        np.testing.assert_array_equal(each, wanted)
    assert counters.size and not counters.any()


CHOSEN = "group of 12, head dim 96"


@pytest.mark.parametrize(
    "name", with_further(CASES, *(name for name in CASES if name != CHOSEN))
)
def test_one_launch_has_the_bits_of_two(compile_call, name):
    """All options, rows that no request owns, and requests of several rows."""
    this = CASES[name]
    batches = [this.arguments(this.operands(batch)) for batch in BATCHES]
    function = this.attend(None)
    one = compile_call(function, batches[0], order=ORDERS["backwards"])
    two = compile_call(function, batches[0])
    for arguments in batches:
        assert_same_bits(one, two, arguments)


@pytest.mark.parametrize("order", with_further(["scattered", "backwards"], "backwards"))
def test_many_pieces_in_any_order(compile_call, order):
    """Requests of up to 36 pieces beside one of a single piece and a free row.

    In sections of a tile of its own, as float32 has them on RDNA.
    """
    lengths = (2300, 700, 60, 0)
    operands = make_operands(
        Workload(
            name="long",
            query_lengths=(1, 1, 1, 0),
            context_lengths=lengths,
            num_heads=6,
            num_kv_heads=2,
            head_dim=32,
            value_head_dim=32,
            block_size=64,
            num_layers=1,
        ),
        0,
    )
    pools = map(np.nan_to_num, (operands.key_pool, operands.value_pool))
    rows = np.zeros((4, 6, 32), np.float32)
    rows[:3] = operands.queries[0]
    arguments = [rows, *pools, np.int32(0), operands.block_tables, None]
    arguments += operands[4:7]
    function = functools.partial(
        paged_attention, max_query_length=1, return_lse=True, sinks=jnp.arange(6.0)
    )
    tile = dataclasses.replace(TUNING.decode, outer_section=16)
    tuning = dataclasses.replace(TUNING, decode=tile)
    one = compile_call(function, arguments, order=ORDERS[order], tuning=tuning)
    two = compile_call(function, arguments, tuning=tuning)
    assert_same_bits(one, two, arguments)
    # Shorter ones have other pieces, and so other rows to be joined and cleared.
    arguments[-1] = np.array((1, 1500, 0, 0), np.int32)
    assert_same_bits(one, two, arguments)


def lower_decoding(platform, target, monkeypatch, **fields):
    """The kernels of a decoding call, as the choice for a card makes them."""
    monkeypatch.setattr(platforms, "find_target", lambda _: target)
    queries, pools = make_shapes(**fields)
    call = make_call(queries, pools, max_query_length=1)
    call = dataclasses.replace(call, is_in_one_launch=is_one_launch_asked())
    return find_kernels(lower(find_kernel(call, platform), (call,), platform))


@pytest.mark.parametrize("platform, target", [("rocm", "gfx942"), ("cuda", "sm_90")])
def test_it_is_off_unless_asked(monkeypatch, platform, target):
    """One kernel instead of two; its atomic is of both semantics, at the device."""
    names = [each.name for each in lower_decoding(platform, target, monkeypatch)]
    assert names == ["jkv_decode", "jkv_join"]
    monkeypatch.setenv(LAUNCH_SWITCH, "1")
    (kernel,) = lower_decoding(platform, target, monkeypatch)
    assert kernel.name == "jkv_decode"
    assert len(re.findall(r"tt\.atomic_rmw.*scope = 1 .*sem = 4 ", kernel.text)) == 1
    assert kernel.text.count("gpu.barrier") == 2


def test_programs_of_several_waves_take_two_launches_on_cdna(monkeypatch):
    """And on AMD cards that are not known; elsewhere they take one."""
    monkeypatch.setenv(LAUNCH_SWITCH, "1")
    queries, pools = make_shapes(256)
    for platform, target, num_kernels in (
        ("rocm", "gfx942", 2),
        ("rocm", None, 2),
        ("rocm", "gfx1100", 1),
        ("cuda", "sm_90", 1),
        ("cuda", None, 1),
    ):
        tuning = find_tuning(queries, pools, platform, target)
        assert tuning.decode.num_warps > 1
        reason = why_two_launches(tuning, platform, target)
        assert (reason is None) == (num_kernels == 1)
    assert len(lower_decoding("rocm", "gfx942", monkeypatch, head_dim=256)) == 2

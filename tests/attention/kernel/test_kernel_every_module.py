"""All kernels of the table in both lowerings: equal modules and launches.

Lowering takes minutes, so this is a separate suite. The newest JAX lowers for one GPU
of each family, the oldest for all. `test_kernel_machine_code.py` tests the machine
code, of Pallas' lowering.
"""

import functools
import json

import jax
import pytest
from support.attention.kernel_lowering import (
    PALLAS,
    find_kernels,
    lower,
    lower_derivative,
    lower_kernels,
    make_shapes,
    written_for,
)
from support.attention.kernel_table import (
    BACKWARD_SHAPES,
    FEW_BACKWARD,
    SHAPES,
    STORED,
    TARGETS,
    kernels_of,
)
from support.attention.slot_writes import shape_write
from support.jax_versions import few

from jkv.attention.kernel.launches.slots import store_rows
from jkv.attention.kernel.tiles.tuning import find_backward, find_tuning


def list_calls():
    """List the calls and derivatives for all tiles of the table, without duplicates."""
    calls = {}
    for platform, target, known, shapes in TARGETS:
        backward = BACKWARD_SHAPES if shapes is SHAPES else FEW_BACKWARD
        for lowering, find, given in (
            (lower_kernels, find_tuning, shapes),
            (lower_derivative, find_backward, backward),
        ):
            for head_dim, value_dim, fields in given:
                sizes = {key: fields[key] for key in fields if key != "options"}
                operands = make_shapes(head_dim, value_dim=value_dim, **sizes)
                tuning = find(*operands, platform, known)
                as_text = json.dumps(fields, sort_keys=True)
                call = platform, tuning, head_dim, value_dim, as_text, lowering
                if tuning is not None:
                    calls.setdefault(call, known or f"unknown {target}")
    return calls


CALLS = list_calls()


@pytest.mark.parametrize(
    "card", few(dict.fromkeys(CALLS.values()), "gfx950", "gfx1201", "sm_90")
)
def test_both_lowerings_agree(card):
    num_kernels = 0
    for call, known in CALLS.items():
        if known != card:
            continue
        expected = kernels_of(*call, way=PALLAS)
        found = kernels_of(*call, way=written_for(call[0]))
        num_kernels += len(expected)
        assert found == expected, call
    assert num_kernels > 1
    jax.clear_caches()


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
def test_both_lowerings_of_stores_agree(platform):
    for sizes in STORED:
        expected, found = (
            find_kernels(
                lower(
                    functools.partial(store_rows, way=way),
                    (shape_write(sizes),),
                    platform,
                )
            )
            for way in (PALLAS, written_for(platform))
        )
        assert found == expected and len(found) == 1, sizes


@pytest.mark.one_end
def test_every_kernel_is_covered():
    """There are some six hundred modules, of all kernel names."""
    kernels = {kernel for call in CALLS for kernel in kernels_of(*call, way=PALLAS)}
    assert len(kernels) > 500
    assert {kernel.name for kernel in kernels} == {
        "jkv_decode",
        "jkv_isolate",
        "jkv_isolate_queries",
        "jkv_join",
        "jkv_position",
        "jkv_prefill",
        "jkv_query_gradients",
        "jkv_token_gradients",
    }

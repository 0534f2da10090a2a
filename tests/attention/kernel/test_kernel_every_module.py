"""All kernels of the table by both lowerings: the same modules, started alike.

Minutes of lowering: a suite of its own, for each end of the range of JAX. The machine
code of a module is tested by `test_kernel_machine_code.py`, of Pallas' lowering.
"""

import functools
import json

import jax
import pytest
from support.kernel_lowering import (
    PALLAS,
    find_kernels,
    lower,
    lower_derivative,
    lower_kernels,
    make_shapes,
    written_for,
)
from support.kernel_table import (
    BACKWARD_SHAPES,
    FEW_BACKWARD,
    SHAPES,
    STORED,
    TARGETS,
    kernels_of,
)
from support.slot_writes import shape_write

from jkv.attention.kernel.launches.slots import store_rows
from jkv.attention.kernel.tiles.tuning import find_backward, find_tuning


def list_calls():
    """Calls and derivatives by all tiles of the table, each of them once."""
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


@pytest.mark.parametrize("card", dict.fromkeys(CALLS.values()))
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
def test_they_agree_about_storing(platform):
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


def test_that_is_every_kernel():
    """Some six hundred modules, of all names that kernels have."""
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

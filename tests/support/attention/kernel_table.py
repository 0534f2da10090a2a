"""Inputs for compiled kernels: shapes for each row of the tuning table, and GPUs."""

import functools
import json
import os

import jax.numpy as jnp

from support.attention.kernel_lowering import (
    PALLAS,
    find_kernels,
    lower_kernels,
    make_shapes,
    shape,
)
from support.attention.slot_writes import Sizes

KEEP = bool(os.environ.get("JKV_KEEP_RESULTS"))
# All options, blocks smaller than a tile, and a padded group.
HARDEST = {"group": 12, "block_size": 4, "options": "all"}
# Blocks of at least a tile leave fewer registers free: a window and a soft cap on 8-bit
# storage needed more on gfx1201 than in blocks of 4, most with one query head per kv
# head.
WHOLE = {"group": 1, "block_size": 64, "options": "all"}
FOUR_BITS = {"kv_dtype": "int8", "value_dtype": "int4"}
# (head dim, value head dim, options): the hardest shapes of each row of the table.
SHAPES = [
    (96, 96, HARDEST),
    (128, 128, {"dtype": "float16", **HARDEST}),
    (64, 64, HARDEST),
    (256, 256, HARDEST),
    (256, 256, {}),
    (576, 512, HARDEST),
    *((dim, dim, {"dtype": "float32"}) for dim in (96, 128, 256)),
    *((dim, dim, {"dtype": "float32", **HARDEST}) for dim in (64, 112, 208, 240)),
    (128, 128, {"dtype": "float32", "kv_dtype": "int8", **HARDEST}),
    (576, 512, {"dtype": "float32", **HARDEST}),
    (128, 128, {"kv_dtype": "float8_e4m3fn", **HARDEST}),
    *((dim, dim, WHOLE) for dim in (128, 256)),
    (128, 128, {"kv_dtype": "int8", **WHOLE}),
    (256, 256, {"kv_dtype": "int8"}),
    # 8-bit storage, and heads split into three pieces, which have table rows of their
    # own.
    *((64, 64, {"kv_dtype": "int8", **options}) for options in ({}, HARDEST)),
    (112, 112, {"kv_dtype": "int8", **HARDEST}),
    (176, 176, HARDEST),
    (224, 224, HARDEST),
    (576, 512, {"kv_dtype": "float8_e4m3fn", "group": 16}),
    (576, 512, {"kv_dtype": "int8", "group": 32}),
    (576, 512, {"dtype": "float16", "kv_dtype": "int8"}),
    # Head dims that are not multiples of 16, and blocks that are not a power of two.
    (72, 72, {"group": 4, "block_size": 24, "options": "all"}),
    (120, 120, {"kv_dtype": "int8", "group": 8, "block_size": 24}),
    # 4-bit values, or 4-bit keys and values, in whole sections and in three pieces.
    (128, 128, {**FOUR_BITS, **HARDEST}),
    (128, 128, {**FOUR_BITS, **WHOLE}),
    (128, 128, FOUR_BITS),
    *((dim, dim, {"kv_dtype": "int4", **HARDEST}) for dim in (96, 112, 128)),
    (128, 128, {"kv_dtype": "int4", **WHOLE}),
    (128, 128, {"value_dtype": "int4", **HARDEST}),
    (256, 256, {**FOUR_BITS, **HARDEST}),
    # One long context in many pieces, joined by several warps.
    *((dim, min(dim, 512), {"rows": 1}) for dim in (128, 576)),
]
# Options by block size and query heads per kv head, for the widest of some rows.
CROSS = [
    (dim, dim, {**kind, "group": group, "block_size": size, "options": options})
    for dim, kind in (
        (128, {}),
        (64, {"kv_dtype": "int8"}),
        (128, {"kv_dtype": "int8"}),
    )
    for options in ("window", "soft cap", "all")
    for size in (4, 64)
    for group in (1, 7)
]
if KEEP:  # the whole table
    SHAPES += CROSS
    SHAPES += [(dim, dim, {}) for dim in (64, 80, 96, 128, 192, 256)]
    SHAPES += [(192, 128, {}), (576, 512, {"group": 16})]
    SHAPES += [(dim, dim, HARDEST) for dim in (128, 192)]
    SHAPES += [
        (dim, min(dim, 512), {"kv_dtype": kv_dtype, **options})
        for kv_dtype in ("int8", "float8_e4m3fn")
        for dim in (64, 128, 256, 576)
        for options in ({}, HARDEST)
    ]
    SHAPES += [(128, 128, {"kv_dtype": "int8", "dtype": "float32"})]
    SHAPES += [(64, 64, {"dtype": "float32"}), (576, 512, {"group": 128})]
if os.environ.get("JKV_ALL_SHAPES"):  # every head dim, in each kind of storage
    SHAPES += [
        (dim, dim, {**kind, **options})
        for dim in range(16, 257, 16)
        for kind in ({}, {"dtype": "float16"}, {"kv_dtype": "int8"}, FOUR_BITS)
        for options in ({}, HARDEST)
    ]
    SHAPES += [(dim, dim, {"dtype": "float32"}) for dim in range(16, 257, 16)]
    SHAPES += [
        (dim, dim, {"kv_dtype": "float8_e4m3fn", **HARDEST})
        for dim in range(16, 257, 16)
    ]
# Derivatives: unquantized pools, in blocks smaller and larger than a tile.
BACKWARD_SHAPES = [
    (dim, min(dim, 512), {"dtype": dtype, "has_bits": False, **options})
    for dtype, dims in (
        ("float16", (64, 80, 128, 192, 256, 576)),
        ("float32", (64, 96, 112, 128, 256)),
    )
    for dim in dims
    for options in (HARDEST, {"block_size": 64})
]
BACKWARD_SHAPES += [
    (72, 72, {"dtype": "float16", "has_bits": False, "group": 3, "block_size": 24})
]
# Two blocks form a tile of tokens on some GPUs.
BACKWARD_SHAPES += [
    (dim, dim, {"dtype": "float16", "has_bits": False}) for dim in (32, 64, 96, 128)
]
# bfloat16 as numbers, and as bits (then only queries have gradients).
BACKWARD_SHAPES += [(128, 128, {"has_bits": bits, **HARDEST}) for bits in (False, True)]
if os.environ.get("JKV_ALL_SHAPES"):
    BACKWARD_SHAPES += [
        (dim, dim, {"dtype": dtype, "has_bits": False, **HARDEST})
        for dtype in ("float16", "float32")
        for dim in range(16, 257, 16)
    ]
FEW_BACKWARD = [
    (128, 128, {"dtype": dtype, "has_bits": False, **HARDEST})
    for dtype in ("float16", "float32")
]
# The kernel that stores rows: plain, latent in parts of blocks, floats, and rounded.
STORED = [
    Sizes(head_dims=(128, 128), heads=8, block_size=16, blocks=2**17),
    Sizes(head_dims=(576,), heads=1, block_size=24, part=1),
    Sizes(dtype="int8", head_dims=(72, 72), heads=8, block_size=16),
    Sizes(dtype="float16", head_dims=(128, 128), heads=8, block_size=16),
    Sizes(dtype="float32", head_dims=(256, 256), heads=8, block_size=16),
    Sizes(dtype="int8", head_dims=(128, 128), heads=8, block_size=16),
    Sizes(dtype="float8_e4m3fn", head_dims=(256, 256), block_size=16, given="float32"),
    Sizes(dtype="float8_e5m2", head_dims=(576,), heads=1, block_size=24, part=1),
    Sizes(dtype="int8", value_dtype="int4", head_dims=(128, 128), given="float32"),
]
FEW = [(128, 128, HARDEST), (256, 256, {}), (576, 512, {"group": 16})]
FEW += [(128, 128, {"kv_dtype": "int8", **HARDEST})]
FEW += [(128, 128, {**FOUR_BITS, **HARDEST})]
FEW += [(128, 128, {"dtype": "float32", **HARDEST})]
# (platform, GPU of the compiler, GPU known at tracing, shapes).
TARGETS = [
    # It shares the rows of gfx942.
    ("rocm", "gfx90a", "gfx90a", SHAPES if KEEP else FEW),
    *(("rocm", t, t, SHAPES) for t in ("gfx942", "gfx950")),
    *(("rocm", t, t, SHAPES) for t in ("gfx1100", "gfx1201")),
    ("cuda", "sm_90", "sm_90", SHAPES),
    *(("rocm", t, None, FEW) for t in ("gfx90a", "gfx942", "gfx950", "gfx1100")),
    *(("cuda", t, None, FEW) for t in ("sm_80", "sm_89", "sm_90")),
    # GPUs that share a family's rows with the GPUs above.
    ("rocm", "gfx1250", "gfx1250", FEW),
    *(("cuda", t, t, FEW) for t in ("sm_100", "sm_120")),
]


@functools.cache
def kernels_of(
    platform, tuning, head_dim, value_dim, fields, lower=lower_kernels, way=PALLAS
):
    """Return a call's kernels, shared by all targets of a family; `fields` is JSON."""
    lower_one = functools.partial(lower, way=way)
    fields = json.loads(fields)
    wanted, options = fields.pop("options", "none"), {}
    queries, pools = make_shapes(head_dim, value_dim=value_dim, **fields)
    if wanted in ("window", "all"):
        options["window"] = shape()
    if wanted in ("soft cap", "all"):
        options["soft_cap"] = 30.0
    if wanted == "all":
        options["sinks"] = shape(queries.shape[1], dtype=jnp.float32)
    call = queries, pools, tuning, platform
    found = find_kernels(lower_one(*call, **options))
    if lower is not lower_kernels:
        return found
    lanes = {"has_lanes": True, **options, "window": None}
    has_lanes = fields.get("group", 4) <= 8  # larger groups fill the tile
    if has_lanes and wanted in ("none", "all"):
        found += find_kernels(lower_one(*call, **lanes))[:1]
    if wanted == "all":
        found += find_kernels(lower_one(*call, by_position=True, **options))[:1]
        if has_lanes:
            found += find_kernels(lower_one(*call, by_position=True, **lanes))[:1]
    return found

"""Machine code of what would be dispatched, for cards that are not there.

Needs the `triton` wheel (`pip install '.[amd-compile]'`, 1 GB): XLA embeds the same
compiler, in another revision. With `JKV_KEEP_RESULTS=1` the table that is printed goes
to `benchmarks/results/kernel_code.json` too. `JKV_ALL_SHAPES=1` compiles every head dim
that the table promises, which takes half an hour. With `-k gfx942` the rows of that
card alone are made anew.
"""

import functools
import json
import os

import jax
import jax.numpy as jnp
import pytest
from support.kernel_lowering import (
    find_kernels,
    lower,
    lower_derivative,
    lower_kernels,
    make_shapes,
    shape,
)
from support.paths import ROOT
from support.slot_writes import Sizes, shape_write

from jkv.attention.kernel.slots import store_rows
from jkv.attention.kernel.table import TABLE
from jkv.attention.kernel.tuning import find_backward, find_tuning

triton = pytest.importorskip(
    "triton", reason="machine code needs the extra: pip install '.[amd-compile]'"
)

from support.triton_machine_code import (  # noqa: E402
    SHARED_LIMIT,
    compile_kernel,
)

KEEP = bool(os.environ.get("JKV_KEEP_RESULTS"))
RESULTS = ROOT / "benchmarks" / "results" / "kernel_code.json"
# All the options there are, blocks smaller than a tile, a group that is padded.
HARDEST = {"group": 12, "block_size": 4, "options": "all"}
# Blocks that hold a tile leave other registers free: a window and a soft cap on bytes
# took more of gfx1201's than in blocks of 4, and a kv head for each query head most.
WHOLE = {"group": 1, "block_size": 64, "options": "all"}
FOUR_BITS = {"kv_dtype": "int8", "value_dtype": "int4"}
# Head dim, value head dim, the rest: each row of the table by its hardest shapes.
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
    # Narrow bytes, and heads cut into three pieces, which have rows of their own.
    *((64, 64, {"kv_dtype": "int8", **options}) for options in ({}, HARDEST)),
    (112, 112, {"kv_dtype": "int8", **HARDEST}),
    (176, 176, HARDEST),
    (224, 224, HARDEST),
    (576, 512, {"kv_dtype": "float8_e4m3fn", "group": 16}),
    # Head dims that are no multiples of 16, and blocks that are no power of two.
    (72, 72, {"group": 4, "block_size": 24, "options": "all"}),
    (120, 120, {"kv_dtype": "int8", "group": 8, "block_size": 24}),
    # Values of four bits, or both, in whole sections and in three pieces each.
    (128, 128, {**FOUR_BITS, **HARDEST}),
    (128, 128, {**FOUR_BITS, **WHOLE}),
    (128, 128, FOUR_BITS),
    *((dim, dim, {"kv_dtype": "int4", **HARDEST}) for dim in (96, 112, 128)),
    (128, 128, {"kv_dtype": "int4", **WHOLE}),
    (128, 128, {"value_dtype": "int4", **HARDEST}),
    (256, 256, {**FOUR_BITS, **HARDEST}),
    # One long context in many pieces, which are joined by several warps.
    *((dim, min(dim, 512), {"rows": 1}) for dim in (128, 576)),
]
# Options by block size and query heads of a kv head, for the widest of some rows.
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
# Of derivatives: pools of whole floats, in blocks smaller and larger than a tile.
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
# bfloat16 in two ways: as numbers, and as bits, of which only queries have gradients.
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
# Of the kernel that stores rows: plain, latent in parts of blocks, floats, and rounded.
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
# Where the code runs, the card that was known when it was traced, and which shapes.
TARGETS = [
    *(("rocm", t, t, SHAPES) for t in ("gfx90a", "gfx942", "gfx950")),
    *(("rocm", t, t, SHAPES) for t in ("gfx1100", "gfx1201")),
    ("cuda", "sm_90", "sm_90", SHAPES),
    *(("rocm", t, None, FEW) for t in ("gfx90a", "gfx942", "gfx950", "gfx1100")),
    *(("cuda", t, None, FEW) for t in ("sm_80", "sm_89", "sm_90")),
    # Cards that share a family's rows with those above.
    ("rocm", "gfx1250", "gfx1250", FEW),
    *(("cuda", t, t, FEW) for t in ("sm_100", "sm_120")),
]
# Of a carried step of bytes in one block, where it waits for memory more than once.
MORE_WAITS = {("gfx1100", 48): 3, ("gfx1100", 96): 2}
# Launched with every prompt, but what follows a look for NaN hardly ever runs: it may
# keep registers in memory where the kernel beside it has none left.
RARE = "jkv_isolate", "jkv_isolate_queries"
store = functools.partial(store_rows, interpret=False)
table: list[dict[str, object]] = []


@pytest.fixture(scope="module", autouse=True)
def keep_table():
    """Print the table after the last test, and keep it if asked to."""
    yield
    for entry in table:
        print(*entry.values())
    if KEEP and table:
        versions = {"jax": jax.__version__, "triton": triton.__version__}
        lines = ",\n".join("  " + json.dumps(entry) for entry in _with_the_others())
        head = f'{{"versions": {json.dumps(versions)},\n "kernels": [\n'
        RESULTS.write_text(f"{head}{lines}\n]}}\n")


def _with_the_others():
    """The table, and of cards that were not compiled for now what was kept of them."""
    cards = [(target, known or "unknown") for _, target, known, _ in TARGETS]
    kept = json.loads(RESULTS.read_text())["kernels"]
    made = set(map(_find_part, table))
    kept = [entry for entry in kept if _find_part(entry) not in made]
    return sorted(
        table + kept, key=lambda entry: cards.index((entry["target"], entry["card"]))
    )


def _find_part(entry):
    """The card, and which of the tests here compiled it."""
    tests = {
        "jkv_query_gradients": "derivative",
        "jkv_token_gradients": "derivative",
        "jkv_store": "store",
    }
    return entry["target"], entry["card"], tests.get(entry["kernel"], "attention")


@functools.cache
def kernels_of(platform, tuning, head_dim, value_dim, fields, lower=lower_kernels):
    """The kernels of a call, the same for all targets of a family; fields as JSON."""
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
    found = find_kernels(lower(*call, **options))
    if wanted == "all" and lower is lower_kernels:
        options["by_position"] = True
        found += find_kernels(lower_kernels(*call, **options))[:1]
        if fields.get("group", 4) <= 8:  # or a tile has no room for others' rows
            del options["window"]
            with_lanes = lower_kernels(*call, has_lanes=True, **options)
            found += find_kernels(with_lanes)[:1]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "platform, target, known, shapes",
    TARGETS,
    ids=[f"{target}-{known or 'unknown'}" for _, target, known, _ in TARGETS],
)
def test_nothing_spills(platform, target, known, shapes):
    """No spills, shared memory within limits, matrix instructions, for every shape."""
    served = 0
    for head_dim, value_dim, fields in shapes:
        sizes = {key: fields[key] for key in fields if key != "options"}
        queries, pools = make_shapes(head_dim, value_dim=value_dim, **sizes)
        entry = {
            "target": target,
            "card": known or "unknown",
            "head dims": f"{head_dim}/{value_dim}",
            "group": queries.shape[1] // pools.num_kv_heads,
            "block size": pools.block_size,
            "queries": str(queries.dtype),
            "elements": str(pools.formats),
            "options": fields.get("options", "none"),
        }
        tuning = find_tuning(queries, pools, platform, known)
        if tuning is None:
            table.append(entry | {"kernel": "the plain path"})
            continue
        served += 1
        as_text = json.dumps(fields, sort_keys=True)
        for kernel in kernels_of(platform, tuning, head_dim, value_dim, as_text):
            code = compile_kernel(kernel, target)
            table.append(entry | {"kernel": kernel.name} | code._asdict())
            assert code.spills == 0 or kernel.name in RARE, table[-1]
            assert code.shared_bytes <= SHARED_LIMIT[target], table[-1]
            soft_cap = None if fields.get("options") in (None, "window") else 30.0
            is_carried = tuning.decode_tile(soft_cap).is_carried
            if kernel.name == "jkv_decode" and is_carried:
                # One for a tile; one before it for the ids of several blocks. gfx12
                # loads scales of two tokens into the halves of one register: the second
                # waits for the first, and the ids with it.
                has_halves = target.startswith("gfx12") and pools.key_scales is not None
                has_one_block = pools.block_size % tuning.decode.tokens == 0
                waits = 1 if has_one_block and not has_halves else 2
                if has_one_block:
                    waits = MORE_WAITS.get((target, head_dim), waits)
                if has_halves and fields.get("options", "none") != "none":
                    waits = 3  # nearly all registers are taken
                if has_halves and pools.block_size & (pools.block_size - 1):
                    waits = 3  # columns and slots are quotients and remainders
                # Tiles of keys and values differ, and so do the lanes that load them.
                waits += any(each.is_turned for each in pools.formats)
                assert code.round_trips is None or code.round_trips <= waits, table[-1]
            if kernel.name != "jkv_join":
                assert code.matrix > 0 and code.step["matrix"] > 0, table[-1]
    assert served >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "platform, target, known, shapes",
    [
        (*card, BACKWARD_SHAPES if shapes is SHAPES else FEW_BACKWARD)
        for *card, shapes in TARGETS
    ],
    ids=[f"{target}-{known or 'unknown'}" for _, target, known, _ in TARGETS],
)
def test_no_derivative_spills(platform, target, known, shapes):
    """Likewise of the derivatives' kernels: queries' and tokens' of each shape."""
    served = 0
    for head_dim, value_dim, fields in shapes:
        sizes = {key: fields[key] for key in fields if key != "options"}
        queries, pools = make_shapes(head_dim, value_dim=value_dim, **sizes)
        tuning = find_backward(queries, pools, platform, known)
        if tuning is None:
            continue
        served += 1
        entry = {
            "target": target,
            "card": known or "unknown",
            "head dims": f"{head_dim}/{value_dim}",
            "group": queries.shape[1] // pools.num_kv_heads,
            "block size": pools.block_size,
            "queries": str(queries.dtype),
            "elements": str(pools.formats),
            "options": fields.get("options", "none"),
        }
        as_text = json.dumps(fields, sort_keys=True)
        given = platform, tuning, head_dim, value_dim, as_text
        kernels = kernels_of(*given, lower=lower_derivative)
        # Of queries two: what they are, and what NaN of keys made of them.
        assert len(kernels) == (3 if pools.keys.dtype != jnp.uint16 else 2)
        for kernel in kernels:
            code = compile_kernel(kernel, target)
            table.append(entry | {"kernel": kernel.name} | code._asdict())
            assert code.spills == 0 or kernel.name in RARE, table[-1]
            assert code.shared_bytes <= SHARED_LIMIT[target], table[-1]
            assert code.matrix > 0 and code.step["matrix"] > 0, table[-1]
    assert served


@pytest.mark.slow
@pytest.mark.parametrize(
    "platform, target, known",
    [card for *card, _ in TARGETS if card[2] is not None],  # stored alike on all
    ids=[target for _, target, known, _ in TARGETS if known is not None],
)
def test_no_store_spills(platform, target, known):
    """Likewise of the kernel that stores rows: one load and one store of each part."""
    for sizes in STORED:
        lowered = lower(store, (shape_write(sizes),), platform)
        (kernel,) = find_kernels(lowered)
        code = compile_kernel(kernel, target)
        entry = {
            "target": target,
            "card": known,
            "head dims": "/".join(map(str, sizes.head_dims)),
            "group": 1,
            "block size": sizes.block_size,
            "queries": "none",
            "elements": str(shape_write(sizes).formats),
            "options": "none" if sizes.part is None else "part",
        }
        table.append(entry | {"kernel": kernel.name} | code._asdict())
        assert code.spills == code.scalar_spills == code.shared_bytes == 0, table[-1]
        assert code.registers <= 64, table[-1]


def test_every_row_is_compiled():
    """The shapes reach each row of each family."""
    reached = set()
    for platform, _, known, shapes in TARGETS:
        for head_dim, value_dim, fields in shapes:
            fields = {key: fields[key] for key in fields if key != "options"}
            queries, pools = make_shapes(head_dim, value_dim=value_dim, **fields)
            tuning = find_tuning(queries, pools, platform, known)
            reached.add(tuning)
    rows = {
        row.tuned_for(family.units) for family in TABLE.values() for row in family.rows
    }
    assert rows == reached - {None}
    reached = {
        find_backward(
            *make_shapes(
                head_dim,
                value_dim=value_dim,
                **{key: fields[key] for key in fields if key != "options"},
            ),
            platform,
            known,
        )
        for platform, _, known, _ in TARGETS
        for head_dim, value_dim, fields in BACKWARD_SHAPES
    }
    rows = {row for family in TABLE.values() for row in family.backward}
    assert rows == reached - {None}

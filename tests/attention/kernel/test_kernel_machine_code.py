"""Machine code of the kernels for absent GPUs.

Requires the `triton` wheel (`pip install '.[amd-compile]'`, 1 GB): XLA embeds another
revision of the same compiler. A module that this compiler has compiled before is not
compiled again: its code is read from `benchmarks/results/kernel_code.json`, which has a
digest of each module. `JKV_KEEP_RESULTS=1` compiles all and writes that file.
`JKV_ALL_SHAPES=1` compiles every supported head dim, which takes half an hour. `-k
gfx942` updates only that GPU's rows.
"""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from support.attention.kernel_lowering import (
    PALLAS,
    find_kernels,
    lower,
    lower_derivative,
    lower_kernels,
    make_shapes,
    shape,
)
from support.attention.kernel_table import (
    BACKWARD_SHAPES,
    FEW_BACKWARD,
    KEEP,
    SHAPES,
    STORED,
    TARGETS,
    kernels_of,
)
from support.attention.slot_writes import shape_write
from support.paths import ROOT

from jkv.attention.backend import Past
from jkv.attention.kernel.launches.slots import store_rows
from jkv.attention.kernel.tiles.table import TABLE, Techniques
from jkv.attention.kernel.tiles.tuning import find_backward, find_tuning

triton = pytest.importorskip(
    "triton", reason="machine code needs the extra: pip install '.[amd-compile]'"
)

from support.attention.triton_machine_code import (  # noqa: E402
    SHARED_LIMIT,
    Code,
    compile_kernel,
)

RESULTS = ROOT / "benchmarks" / "results" / "kernel_code.json"
# Memory waits of a carried step over 8-bit storage in one block.
MORE_WAITS = {("gfx1100", 48): 3, ("gfx1100", 96): 2}
# Launched with every prompt, but the code after the NaN check rarely runs: it may spill
# if the main kernel uses all registers.
RARE = "jkv_isolate", "jkv_isolate_queries"
store = functools.partial(store_rows, way=PALLAS)
table: list[dict[str, object]] = []


@functools.cache
def read_recorded():
    """Return the code of recorded modules by GPU and digest, if of this compiler."""
    recorded = json.loads(RESULTS.read_text())
    if KEEP or recorded["versions"]["triton"] != triton.__version__:
        return {}
    return {
        (entry["target"], entry["module"]): Code(*map(entry.get, Code._fields))
        for entry in recorded["kernels"]
        if "module" in entry
    }


def find_code(kernel, target):
    """Return the code of a kernel on a GPU: as recorded, or compiled."""
    return read_recorded().get((target, kernel.digest)) or compile_kernel(
        kernel, target
    )


def describe(target, known, queries, pools, options):
    """Return the fields of the table that name a call of attention."""
    return {
        "target": target,
        "card": known or "unknown",
        "head dims": f"{pools.head_dim}/{pools.value_dim}",
        "group": queries.shape[1] // pools.num_kv_heads,
        "block size": pools.block_size,
        "queries": str(queries.dtype),
        "elements": str(pools.formats),
        "options": options,
    }


def record(entry, kernel, code):
    """Add a kernel's code to the table."""
    table.append(
        entry | {"kernel": kernel.name, "module": kernel.digest} | code._asdict()
    )


@pytest.fixture(scope="module", autouse=True)
def keep_table():
    """Print the table after the last test, and store it on request."""
    yield
    for entry in table:
        print(*entry.values())
    if KEEP and table:
        versions = {"jax": jax.__version__, "triton": triton.__version__}
        lines = ",\n".join("  " + json.dumps(entry) for entry in _with_the_others())
        head = f'{{"versions": {json.dumps(versions)},\n "kernels": [\n'
        RESULTS.write_text(f"{head}{lines}\n]}}\n")


def _with_the_others():
    """Return the table with the stored entries of GPUs not compiled in this run."""
    cards = [(target, known or "unknown") for _, target, known, _ in TARGETS]
    kept = json.loads(RESULTS.read_text())["kernels"]
    made = set(map(_find_part, table))
    kept = [entry for entry in kept if _find_part(entry) not in made]
    return sorted(
        table + kept, key=lambda entry: cards.index((entry["target"], entry["card"]))
    )


def _find_part(entry):
    """Return the GPU, and the test that compiled it."""
    tests = {
        "jkv_query_gradients": "derivative",
        "jkv_token_gradients": "derivative",
        "jkv_isolate_queries": "derivative",
        "jkv_store": "store",
    }
    test = tests.get(entry["kernel"], "attention")
    test = "masked" if entry["options"] in MASKS else test
    return entry["target"], entry["card"], test


MASKS = "past before", "past between"
# One GPU of each family, and head dims and dtypes of common models.
MASKED_TARGETS = ("gfx942", "gfx1100", "sm_90")
MASKED_SHAPES = (
    dict(head_dim=128),
    dict(head_dim=128, kv_dtype="int8"),
    dict(head_dim=256, group=8, kv_heads=1),
)


@pytest.mark.slow
@pytest.mark.parametrize("target", MASKED_TARGETS)
def test_no_masked_kernel_spills(target):
    """Calls that limit the past, with and without a first token."""
    platform, known = next((p, k) for p, t, k, _ in TARGETS if t == target)
    last, both = Past(shape(32)), Past(shape(32), shape(32))
    for fields in MASKED_SHAPES:
        queries, pools = make_shapes(**fields)
        tuning = find_tuning(queries, pools, platform, known)
        for past in (last, both) if fields is MASKED_SHAPES[0] else (both,):
            lowered = lower_kernels(queries, pools, tuning, platform, past=past)
            options = MASKS[past.first is not None]
            entry = describe(target, known, queries, pools, options)
            for kernel in find_kernels(lowered):
                code = find_code(kernel, target)
                record(entry, kernel, code)
                assert code.spills == 0 or kernel.name in RARE, table[-1]
                assert code.shared_bytes <= SHARED_LIMIT[target], table[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "platform, target, known, shapes",
    TARGETS,
    ids=[f"{target}-{known or 'unknown'}" for _, target, known, _ in TARGETS],
)
def test_no_kernel_spills(platform, target, known, shapes):
    """No spills, shared memory within limits, matrix instructions, for every shape."""
    served = 0
    for head_dim, value_dim, fields in shapes:
        sizes = {key: fields[key] for key in fields if key != "options"}
        queries, pools = make_shapes(head_dim, value_dim=value_dim, **sizes)
        options = fields.get("options", "none")
        entry = describe(target, known, queries, pools, options)
        tuning = find_tuning(queries, pools, platform, known)
        if tuning is None:
            table.append(entry | {"kernel": "the plain path"})
            continue
        served += 1
        as_text = json.dumps(fields, sort_keys=True)
        for kernel in kernels_of(platform, tuning, head_dim, value_dim, as_text):
            code = find_code(kernel, target)
            record(entry, kernel, code)
            assert code.spills == 0 or kernel.name in RARE, table[-1]
            assert code.shared_bytes <= SHARED_LIMIT[target], table[-1]
            soft_cap = None if fields.get("options") in (None, "window") else 30.0
            is_carried = Techniques.CARRIED in tuning.decode_tile(soft_cap).ways
            if kernel.name == "jkv_decode" and is_carried:
                # One wait for a tile; one before it for the ids of several blocks.
                # gfx12, and gfx11 with a window, loads scales of two tokens into halves
                # of one register: the second waits for the first, and the ids with it.
                halves = "gfx1" if options in ("window", "all") else "gfx12"
                has_halves = target.startswith(halves) and pools.key_scales is not None
                has_one_block = pools.block_size % tuning.decode.tokens == 0
                waits = 1 if has_one_block and not has_halves else 2
                if has_one_block:
                    waits = MORE_WAITS.get((target, head_dim), waits)
                if has_halves and fields.get("options", "none") != "none":
                    waits = 3  # nearly all registers are in use
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
    """The same for gradients of queries and of tokens, for every shape."""
    served = 0
    for head_dim, value_dim, fields in shapes:
        sizes = {key: fields[key] for key in fields if key != "options"}
        queries, pools = make_shapes(head_dim, value_dim=value_dim, **sizes)
        tuning = find_backward(queries, pools, platform, known)
        if tuning is None:
            continue
        served += 1
        options = fields.get("options", "none")
        entry = describe(target, known, queries, pools, options)
        as_text = json.dumps(fields, sort_keys=True)
        given = platform, tuning, head_dim, value_dim, as_text
        kernels = kernels_of(*given, lower=lower_derivative)
        # Two kernels for queries: without and with NaN keys.
        assert len(kernels) == (3 if pools.keys.dtype != jnp.uint16 else 2)
        for kernel in kernels:
            code = find_code(kernel, target)
            record(entry, kernel, code)
            assert code.spills == 0 or kernel.name in RARE, table[-1]
            assert code.shared_bytes <= SHARED_LIMIT[target], table[-1]
            assert code.matrix > 0 and code.step["matrix"] > 0, table[-1]
    assert served


@pytest.mark.slow
@pytest.mark.parametrize(
    "platform, target, known",
    [card for *card, _ in TARGETS if card[2] is not None],  # equal on all GPUs
    ids=[target for _, target, known, _ in TARGETS if known is not None],
)
def test_no_store_spills(platform, target, known):
    """The same for the kernel that stores rows: one load and one store per part."""
    for sizes in STORED:
        lowered = lower(store, (shape_write(sizes),), platform)
        (kernel,) = find_kernels(lowered)
        code = find_code(kernel, target)
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
        record(entry, kernel, code)
        assert code.spills == code.scalar_spills == code.shared_bytes == 0, table[-1]
        assert code.registers <= 64, table[-1]


def test_every_row_is_compiled():
    """The shapes cover every table row of each family."""
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

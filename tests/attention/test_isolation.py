"""NaN and infinity of one sequence do not affect others.

Other sequences are bit-identical, and so are rows of the same sequence that do not
attend to the non-finite token. Rows that attend to it are non-finite where the
reference is, so that a sequence does not continue with wrong numbers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention import formats
from support.attention.attention_workloads import Workload, make_operands
from support.jax_versions import further
from support.tolerances import assert_close

from jkv.attention import paged_attention
from jkv.attention.backend import Requests
from jkv.attention.shared_prefixes import find_shared_prefixes

NUM_ROWS, NUM_BLOCKS, MAX_BLOCKS, BLOCK_SIZE, KV_HEADS, HEADS = 17, 40, 9, 4, 2, 4
# (query length, context length) of each request; all share one trace.
BATCHES = {
    "decode": [(1, 33), (1, 1), (1, 9), (1, 36)],
    "chunks": [(7, 25), (5, 5), (2, 3), (3, 36)],
    "mixed": [(1, 25), (8, 35), (0, 6), (1, 36)],
    "verify": [(3, 25), (4, 36), (4, 11), (4, 30)],
    "branches": [(1, 33), (1, 30), (1, 36), (1, 29)],
    "branches, a leaf last": [(1, 33), (1, 30), (1, 36), (1, 29)],
}
# Number of leading blocks that each request shares with the first one.
BRANCHES = 0, 7, 5, 3
BRANCHING = [batch for batch in BATCHES if batch.startswith("branches")]
BROKEN = np.float32([np.nan, np.inf, -np.inf])
ARRAYS = "queries", "keys", "values", "key_scales", "value_scales"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Static arguments of a call."""

    dtype: str = "float32"  # of the pools
    is_latent: bool = False  # values are part of the keys
    has_sinks: bool = False
    window: int | None = None
    soft_cap: float | None = None


CASES = {
    "plain": Case(),
    "window, sinks, soft cap": Case(window=6, has_sinks=True, soft_cap=2.0),
    "latent, bfloat16": Case(is_latent=True, dtype="bfloat16"),
    "int8": Case(dtype="int8"),
    "float16": Case(dtype="float16"),
    "fp8, window": Case(dtype="float8_e4m3fn", window=6),
}
# The second forces loops that `None` does not need for small calls; the last sums by
# position.
WAYS = {
    "side by side": {},
    "loops": {"implementation": "xla"},
    "by position": {"implementation": "xla", "by_position": True},
    "shared": {"implementation": "xla"},
}
FEW = {
    "side by side": ["latent, bfloat16", "int8"],
    "loops": ["plain", "int8"],
    "by position": ["plain"],
    "shared": ["plain"],
}
CHOSEN = [(way, name) for way in WAYS for name in FEW[way]]
OTHERS = [(way, name) for way in WAYS for name in CASES if name not in FEW[way]]


def make_call(this: Case, batch: str, seed: int = 0):
    """Return the arrays of a call by name, and the operands they were made from."""
    query_lengths, context_lengths = zip(*BATCHES[batch], strict=True)
    operands = make_operands(
        Workload(
            name=batch,
            query_lengths=query_lengths,
            context_lengths=context_lengths,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=16,
            value_head_dim=16,
            block_size=BLOCK_SIZE,
            num_layers=1,
        ),
        seed,
        num_blocks=NUM_BLOCKS,
        max_blocks=MAX_BLOCKS,
    )
    if batch in BRANCHING:
        # The lower of two block ids decides the order.
        first = operands.block_tables[0]
        ends = np.sort(first[[4, 2]])
        first[[4, 2]] = ends if batch == "branches, a leaf last" else ends[::-1]
        for table, count in zip(operands.block_tables, BRANCHES, strict=True):
            table[:count] = operands.block_tables[0, :count]
    queries = np.full((NUM_ROWS, HEADS, 16), 3.0, np.float32)
    queries[: operands.queries.shape[1]] = operands.queries[0]
    arrays = dict(queries=queries, key_scales=None, value_scales=None)
    pools = dict(keys=operands.key_pool, values=operands.value_pool)
    for name, pool in pools.items():
        if this.dtype in ("int8", "float8_e4m3fn"):
            # Slots without a token hold noise.
            pool = np.nan_to_num(pool, nan=7.0)
            pool, scales = formats.quantize(pool, jnp.dtype(this.dtype))
            arrays[f"{name.removesuffix('s')}_scales"] = np.array(
                scales.view(jnp.bfloat16), np.float32
            )
        arrays[name] = np.array(jnp.asarray(pool).astype(this.dtype))
    if this.is_latent:
        arrays["values"] = arrays["value_scales"] = None
    return arrays, operands


def attend(this: Case, operands, arrays, **options):
    """Return output and log-sum-exp, f32[R, H, D] and f32[R, H]."""
    dtype = jnp.dtype(this.dtype)
    return paged_attention(
        arrays["queries"],
        arrays["keys"],
        arrays["values"],
        np.int32(0),
        operands.block_tables,
        None,
        *operands[4:7],
        key_scales=arrays["key_scales"],
        value_scales=arrays["value_scales"],
        kv_dtype=dtype if arrays["key_scales"] is not None else None,
        value_head_dim=12 if this.is_latent else None,
        window=None if this.window is None else np.int32(this.window),
        soft_cap=this.soft_cap,
        sinks=np.linspace(-1.0, 1.0, HEADS, dtype=np.float32)
        if this.has_sinks
        else None,
        return_lse=True,
        **options,
    )


def find_plan(operands):
    """Return the shared prefixes that a step's plan contains."""
    tables, *rows = operands[3:7]
    requests = Requests(tables, np.arange(4, dtype=np.int32), *rows)
    columns = np.arange(MAX_BLOCKS) * BLOCK_SIZE < operands.context_lengths[:, None]
    counts = np.bincount(tables[columns], minlength=NUM_BLOCKS).astype(np.int32)
    found = find_shared_prefixes(requests, counts, block_size=BLOCK_SIZE, fewest=3)
    return {"xla": found}


def locate(operands, request: int, position: int):
    """Return the index of a token in pools and scales."""
    block = operands.block_tables[request, position // BLOCK_SIZE]
    return 0, block, 1, position % BLOCK_SIZE


def break_one(arrays, operands, name: str, request: int, position: int, value):
    """Return the arrays with one non-finite number, and the rows that attend to it."""
    start, length, context = (int(array[request]) for array in operands[4:7])
    row = start + max(0, position - (context - length))
    column, broken = position // BLOCK_SIZE, dict(arrays)
    block = operands.block_tables[request, column]
    sharing = np.flatnonzero(operands.block_tables[:, column] == block)
    broken[name] = arrays[name].copy()
    if name == "queries":
        broken[name][row, 3, 5] = value
        return broken, range(row, row + 1)
    where = locate(operands, request, position)
    broken[name][where if name.endswith("scales") else (*where, 5)] = value
    if len(sharing) > 1:
        return broken, operands.query_starts[sharing]
    return broken, range(row, start + length)


def list_breaks(arrays):
    """Yield the names of arrays and the non-finite values that they can hold."""
    for name in ARRAYS:
        # The scale of a row with infinity is stored as NaN, too.
        for value in BROKEN[:1] if name.endswith("scales") else BROKEN:
            if arrays[name] is None or arrays[name].dtype == np.int8:
                continue
            stored = value.astype(arrays[name].dtype)
            # Some float dtypes have no infinity.
            if not np.isfinite(np.float32(stored)):
                yield name, stored


def play(arrays, operands, lengths):
    """Yield all changes of a batch: name, changed arrays, and affected rows."""
    has_branches = any(lengths is BATCHES[batch] for batch in BRANCHING)
    victims = [request for request, (length, _) in enumerate(lengths) if length]
    for number, (name, value) in enumerate(list_breaks(arrays)):
        for request in (victims[number % len(victims)], victims[-1 - number % 2]):
            length, context = lengths[request]
            # The newest token, one that several rows attend to, an old one; with shared
            # blocks also one that only some of the requests share.
            position = (context - 1, context - 1 - length // 2, 0)[number % 3]
            if has_branches and request:
                position = (BRANCHES[request] - number % 2) * BLOCK_SIZE - 1
            broken = break_one(arrays, operands, name, request, position, value)
            yield f"{name} {value}, request {request}", *broken


@pytest.mark.parametrize("way, name", [*CHOSEN, *further(OTHERS)])
@pytest.mark.one_end
def test_unrelated_rows_are_bit_identical(way, name):
    """Affected rows are non-finite where the reference is."""
    this, num_hit = CASES[name], 0
    for batch, lengths in BATCHES.items():
        arrays, operands = make_call(this, batch)
        call = functools.partial(attend, this, operands)
        if way == "shared":
            plan = find_plan(operands)
            call = functools.partial(call, work_lists=plan)
            assert np.any(plan["xla"].common) == (batch in BRANCHING)
        without = call(arrays, **WAYS[way])
        for case, broken, seeing in play(arrays, operands, lengths):
            unhurt = np.ones(NUM_ROWS, bool)
            unhurt[seeing] = False
            found = call(broken, **WAYS[way])
            for one, other in zip(found, without, strict=True):
                np.testing.assert_array_equal(one[unhurt], other[unhurt], case)
            output = np.asarray(found[0])
            expected, _ = attend(this, operands, broken, implementation="reference")
            is_sound = np.isfinite(expected)
            assert not np.isfinite(output[~is_sound]).any(), case
            # A value may affect its whole row and head, or only itself.
            whole = is_sound.all(axis=-1)
            assert_close(output[whole], expected[whole])
            num_hit += not is_sound.all()
    assert num_hit > 10


GRADIENTS = {
    "plain": Case(),
    "soft cap": Case(soft_cap=2.0),
    "latent": Case(is_latent=True),
}


def make_gradients(this: Case, arrays, operands):
    """Return a function from arrays and cotangents to gradients, by name."""
    names = [name for name in ("queries", "keys", "values") if arrays[name] is not None]

    @jax.jit
    def find_gradients(arrays, d_output, d_lse):
        def call(given):
            given = {**arrays, **given}
            return attend(this, operands, given, implementation="xla")

        back = jax.vjp(call, {name: arrays[name] for name in names})[1]
        return back((d_output, d_lse))[0]

    return find_gradients


def break_rows_and_tokens(arrays, operands, cotangents, value):
    """Yield all changes: name, arguments, and the rows and tokens they may affect."""
    nothing = range(0)
    for number, name in enumerate(("d_output", "d_lse")):
        for row, request in ((NUM_ROWS - 1, None), (4, 1)):
            broken = [array.copy() for array in cotangents]
            broken[number][row, 1] = value
            seen = nothing
            if request is not None:
                start, length, context = (array[request] for array in operands[4:7])
                seen = range(context - length + row - start + 1)
            case = f"{name} {value}, row {row}"
            yield case, (arrays, *broken), range(row, row + 1), request, seen
    for name in ("queries", "keys", "values"):
        if arrays[name] is None:
            continue
        for request, position in ((0, 24), (1, 30), (3, 35), (3, 0)):
            context = int(operands.context_lengths[request])
            if name == "queries" and not position:
                continue
            given = name, request, position, value
            broken, rows = break_one(arrays, operands, *given)
            seen = range(position + 1 if name == "queries" else context)
            yield f"{given}", (broken, *cotangents), rows, request, seen


@pytest.mark.parametrize("name", ["plain", *further(["soft cap", "latent"])])
@pytest.mark.one_end
def test_unrelated_gradients_are_bit_identical(name):
    """Also for non-finite cotangents, of a request's row or of padding."""
    this = GRADIENTS[name]
    arrays, operands = make_call(this, "mixed")
    rng = np.random.default_rng(2)
    shape = NUM_ROWS, HEADS, 12 if this.is_latent else 16
    cotangents = [rng.standard_normal(shape[:n], np.float32) for n in (3, 2)]
    find_gradients = make_gradients(this, arrays, operands)
    without = jax.device_get(find_gradients(arrays, *cotangents))
    assert all(np.isfinite(array).all() for array in without.values())
    for value in BROKEN:
        breaks = break_rows_and_tokens(arrays, operands, cotangents, value)
        for case, given, rows, request, seen in breaks:
            found = jax.device_get(find_gradients(*given))
            sound_rows = np.ones(NUM_ROWS, bool)
            sound_rows[rows] = False
            sound_slots = np.ones((NUM_BLOCKS, BLOCK_SIZE), bool)
            for position in seen:
                block = operands.block_tables[request, position // BLOCK_SIZE]
                sound_slots[block, position % BLOCK_SIZE] = False
            for array, gradient in found.items():
                of_sound, expected = (
                    each[sound_rows]
                    if array == "queries"
                    else each[0].swapaxes(1, 2)[sound_slots]
                    for each in (gradient, without[array])
                )
                np.testing.assert_array_equal(of_sound, expected, f"{array}: {case}")
            is_sound = all(np.isfinite(gradient).all() for gradient in found.values())
            assert is_sound == (request is None)

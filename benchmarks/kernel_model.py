"""Estimate the kernels' share of an MI300X's peak, by a model of machine code.

    python benchmarks/kernel_model.py

No GPU is used: the kernels are compiled for gfx942, a walk over the loop of each
(`tests/support/attention/amd_instruction_walk.py`) gives the cycles of a step, and the
work lists are the kernel's own. The estimate is the largest of several bounds. For
decoding, which should reach the bandwidth:

* memory: the bytes of the contexts over the GPU's bandwidth;
* latency: the serial steps of one program, each with the walk's latency, times the
  rounds in which all programs fit on the GPU;
* issue: the cycles in which instructions are issued, spread evenly over all SIMDs.

Separately, the time to write and read the partial results, if they leave the GPU's
caches.

For prefill, which should reach the peak of matrix instructions, spread evenly over the
GPU, as waves of several programs interleave:

* matrix: the cycles of the matrix units;
* vector: the cycles in which a SIMD issues vector and matrix instructions;
* shared: the cycles of shared-memory transfers, 128 bytes each, without bank conflicts;
* latency: the walk's cycles of a step over the programs that fit in registers and
  shared memory.

Requires `make machine-code`. The model ignores caches (except that the head tiles of a
kv head read its tokens once), the combination of partial results, launch time, masked
steps (they count as unmasked) and interference between programs: it compares a change
with the previous state until a GPU can be timed.
"""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any, NamedTuple

import harness
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from support.attention.amd_instruction_walk import walk  # noqa: E402, the tests assert it, too
from support.attention.kernel_lowering import find_kernels, lower_kernels, make_shapes  # noqa: E402
from support.attention.triton_machine_code import attention_loop, compile_kernel  # noqa: E402

from jkv.attention.backend import Requests, make_requests  # noqa: E402
from jkv.attention.kernel.tiles.table import Techniques, Tile, Tuning  # noqa: E402
from jkv.attention.kernel.tiles.tuning import find_tuning  # noqa: E402
from jkv.attention.kernel.tiles.variant import (  # noqa: E402
    count_decode_heads,
    count_decode_pieces,
    count_head_tiles,
    count_lanes,
    cut_rows,
)
from jkv.attention.kernel.work.cutting import (  # noqa: E402
    list_decode_work,
    list_prefill_work,
    size_decode_work,
    size_prefill_work,
)
from jkv.attention.kernel.work.lists import Work, WorkList  # noqa: E402
from jkv.attention.shared_prefixes import find_shared_prefixes  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "results" / "kernel_model.json"
TARGET = "gfx942"
# MI300X, from AMD's data sheet and the CDNA 3 ISA guide; each SIMD has 512 registers
# per lane of a 64-lane wave, allocated in steps of 8 among its waves.
UNITS, SIMDS, REGISTERS, CLOCK, BANDWIDTH = 304, 4, 512, 2.1e9, 5.3e12
LATENCIES = (700, 900, 1200)  # nanoseconds to memory under load
BLOCK_SIZE = 16
# Batch and context, as in `benchmarks/gpu.py`.
CALLS = ((1, 2_048), (1, 8_192), (1, 131_072), (8, 1_024), (64, 1_024), (64, 8_192))
ELEMENTS = ("bfloat16", "int8", "float8_e4m3fn")
FOUR_BITS = "int8 keys, int4 values"
# Batch and shared tokens; each sequence also has OWN_TOKENS.
FORKS, OWN_TOKENS = ((64, 2_048), (64, 8_192)), 512
# For prefill: 16-bit operations per second, and bytes of shared memory.
PEAK, SHARED = 1307e12, 65_536
PROMPTS = ((1, 8_192), (8, 1_024))
PROMPT_ELEMENTS = ("bfloat16", "int8", "float8_e4m3fnuz", FOUR_BITS)
# Programs of a prompt read the same data: from the package's cache, or as slowly as
# from memory under load.
PROMPT_LATENCIES = (300, 500, 900)
# The table's entry before it was tuned with this model.
BEFORE = Tile(64, 32, 4, 1, ways=Techniques.FULL_FIRST)


class Model(NamedTuple):
    """The attention of a model."""

    head_dim: int
    kv_heads: int
    heads_per_kv: int  # query heads per kv head


# Llama 3 8B, and DeepSeek V3 (latent: values are 512 components of the keys).
LLAMA, DEEPSEEK = Model(128, 8, 4), Model(576, 1, 128)
# One, four and eight query heads per kv head.
FORKED = Model(128, 32, 1), LLAMA, Model(128, 8, 8)


class Compiled(NamedTuple):
    """The compiled decode kernel."""

    model: Model
    tuning: Tuning
    row_heads: int  # query heads per tile
    loop: list[str]
    registers: int
    step_bytes: int  # bytes of keys and values per step

    @property
    def tiles(self) -> int:
        """Tiles of query heads per kv head."""
        return -(-self.model.heads_per_kv // self.row_heads)

    @property
    def head_tiles(self) -> int:
        """Programs per piece."""
        return count_head_tiles(
            self.model.kv_heads, self.model.heads_per_kv, self.row_heads
        )


def find_shapes(elements: str, model: Model) -> tuple[Any, Any, Tuning]:
    """Return queries and pools of these elements, and the table's tuning."""
    key, _, value = elements.removesuffix(" values").partition(" keys, ")
    queries, pools = make_shapes(
        model.head_dim,
        group=model.heads_per_kv,
        kv_heads=model.kv_heads,
        block_size=BLOCK_SIZE,
        kv_dtype=key,
        value_dtype=value or key,
    )
    tuning = find_tuning(queries, pools, "rocm", TARGET)
    assert tuning is not None
    return queries, pools, tuning


def count_waves(registers: int) -> int:
    """Return the number of waves that fit on a SIMD."""
    return REGISTERS // (-(-registers // 8) * 8)


def compile_decode(
    elements: str,
    model: Model = LLAMA,
    *,
    has_lanes: bool = False,
    is_carried: bool | None = None,  # None for the table's choice
) -> Compiled:
    """Compile the kernel for a pool of these elements, optionally another tile."""
    queries, pools, found = find_shapes(elements, model)
    decode = found.decode
    if is_carried is not None:
        others = decode.ways & ~Techniques.CARRIED
        ways = others | (Techniques.CARRIED if is_carried else Techniques(0))
        decode = dataclasses.replace(decode, ways=ways)
    tuning = dataclasses.replace(found, decode=decode)
    options = {"max_query_length": 1, "has_lanes": has_lanes}
    lowered = lower_kernels(queries, pools, tuning, "rocm", **options)
    (kernel,) = (k for k in find_kernels(lowered) if k.name == "jkv_decode")
    code = compile_kernel(kernel, TARGET)
    arrays = [each for each in (pools.keys, pools.values) if each is not None]
    row_bytes = sum(each.shape[-1] * each.dtype.itemsize for each in arrays)
    return Compiled(
        model=model,
        row_heads=count_decode_heads(model.heads_per_kv, tuning),
        tuning=tuning,
        loop=attention_loop(kernel, TARGET),
        registers=code.registers,
        step_bytes=decode.tokens * row_bytes,
    )


def lay_out(batch: int, rows: int, context: int, shared: int = 0) -> Requests:
    """Return `batch` requests of equal rows and context, with a shared prefix."""
    number = jnp.arange(batch, dtype=jnp.int32)
    tables = np.arange(batch * -(-context // BLOCK_SIZE), dtype=np.int32)
    tables = tables.reshape(batch, -1)
    tables[:, : shared // BLOCK_SIZE] = tables[0, : shared // BLOCK_SIZE]
    return make_requests(
        Requests(
            block_tables=jnp.asarray(tables),
            seq_ids=number,
            query_starts=number * rows,
            query_lengths=jnp.full(batch, rows, jnp.int32),
            context_lengths=jnp.full(batch, context, jnp.int32),
        ),
        num_rows=batch * rows,
        block_size=BLOCK_SIZE,
        max_query_length=rows,
    )


def list_work(
    compiled: Compiled, batch: int, context: int, shared: int = 0
) -> WorkList:
    """Return the work list of a call, with shared-prefix attention if `shared`."""
    model = compiled.model
    wanted = count_decode_pieces(model.kv_heads, model.heads_per_kv, compiled.tuning)
    given = batch, batch, context, wanted
    requests = lay_out(batch, 1, context, shared)
    if not shared:
        return list_decode_work(requests, None, size_decode_work(*given))
    lanes = count_lanes(model.heads_per_kv, compiled.tuning)
    owners = jnp.zeros(requests.block_tables.size, jnp.int32)
    found = find_shared_prefixes(
        requests, owners, block_size=BLOCK_SIZE, has_branches=False
    )
    sizes = size_decode_work(*given, num_lanes=lanes)
    return list_decode_work(requests, None, sizes, part_size=BLOCK_SIZE, shared=found)


def count_steps(compiled: Compiled, work: Work) -> np.ndarray:
    """Return the step count of each non-empty program, i32[...]."""
    tokens = np.asarray(work.end - work.first)
    return -(-tokens[tokens > 0] // compiled.tuning.decode.tokens)


def estimate(compiled: Compiled, listed: WorkList, latency: int) -> dict[str, float]:
    """Return the three bounds in microseconds, and the share of the bandwidth."""
    steps = count_steps(compiled, listed.work)
    warps = compiled.tuning.decode.num_warps
    step = walk(compiled.loop, round(latency * CLOCK / 1e9))
    resident = UNITS * SIMDS * count_waves(compiled.registers) // warps
    turns = -(-len(steps) * compiled.head_tiles // resident)
    num_steps = int(steps.sum()) * compiled.head_tiles
    seconds = {
        "memory": num_steps * compiled.step_bytes / compiled.tiles / BANDWIDTH,
        "latency": turns * int(steps.max()) * step.cycles / CLOCK,
        "issue": num_steps * warps * step.issue_cycles / (UNITS * SIMDS) / CLOCK,
    }
    share = seconds["memory"] / max(seconds.values())
    model = compiled.model
    value_dim = min(model.head_dim, 512)
    assert listed.pieces is not None
    num_pieces = int(np.sum(listed.pieces.end - listed.pieces.first))
    partial_bytes = num_pieces * model.kv_heads * model.heads_per_kv * value_dim * 4
    seconds["partial results"] = 2 * partial_bytes / BANDWIDTH
    return {name: value * 1e6 for name, value in seconds.items()} | {"share": share}


def describe(
    compiled: Compiled, elements: str, batch: int, context: int, shared: int = 0
) -> dict[str, Any]:
    """Return a table row: one call at all latencies."""
    listed = list_work(compiled, batch, context, shared)
    programs = len(count_steps(compiled, listed.work)) * compiled.head_tiles
    row: dict[str, Any] = {
        "head dim": compiled.model.head_dim,
        "elements": elements,
        "next tile carried": Techniques.CARRIED in compiled.tuning.decode.ways,
        "call": f"{batch} x {context}",
        "programs": programs,
    }
    for latency in LATENCIES:
        found = estimate(compiled, listed, latency)
        bounds = "memory", "partial results", "issue"
        row |= {name: round(found[name], 2) for name in bounds}
        row[f"latency, {latency} ns"] = round(found["latency"], 2)
        row[f"share, {latency} ns"] = round(found["share"], 3)
    return row


class Prefill(NamedTuple):
    """The compiled prefill kernel."""

    tile: Tile
    row_tokens: int  # tokens per tile of query rows
    loop: list[str]
    registers: int
    shared_bytes: int

    @property
    def programs(self) -> int:
        """Programs that fit on a compute unit."""
        waves = SIMDS * count_waves(self.registers)
        return min(waves // self.tile.num_warps, SHARED // self.shared_bytes)


def compile_prefill(elements: str, tile: Tile | None = None) -> Prefill:
    """Compile the kernel for a pool of these elements, with an optional tile."""
    queries, pools, found = find_shapes(elements, LLAMA)
    tuning = dataclasses.replace(found, prefill=tile or found.prefill)
    lowered = lower_kernels(queries, pools, tuning, "rocm")
    (kernel,) = (k for k in find_kernels(lowered) if k.name == "jkv_prefill")
    code = compile_kernel(kernel, TARGET)
    return Prefill(
        tile=tuning.prefill,
        row_tokens=cut_rows(LLAMA.heads_per_kv, tuning.prefill)[1],
        loop=attention_loop(kernel, TARGET),
        registers=code.registers,
        shared_bytes=code.shared_bytes,
    )


def count_prefill_steps(compiled: Prefill, batch: int, length: int) -> np.ndarray:
    """Return the step count of each tile of prompt rows, i32[...]."""
    requests = lay_out(batch, length, length)
    sizes = size_prefill_work(batch * length, batch, compiled.row_tokens)
    ends = np.asarray(list_prefill_work(requests, sizes).work.end)
    return -(-ends[ends > 0] // compiled.tile.tokens)


def estimate_prefill(
    compiled: Prefill, batch: int, length: int, latency: int
) -> dict[str, float]:
    """Return the bounds in microseconds."""
    steps = count_prefill_steps(compiled, batch, length)
    step = walk(compiled.loop, round(latency * CLOCK / 1e9))
    num_steps = int(steps.sum()) * LLAMA.kv_heads
    num_waves = num_steps * compiled.tile.num_warps
    resident = UNITS * compiled.programs
    cycles = {
        "matrix": num_waves * step.matrix_cycles / (UNITS * SIMDS),
        "vector": num_waves * step.vector_cycles / (UNITS * SIMDS),
        "shared": num_waves * step.shared_cycles / UNITS,
        "latency": max(num_steps / resident, int(steps.max())) * step.cycles,
    }
    return {name: value * 1e6 / CLOCK for name, value in cycles.items()}


def describe_prefill(
    compiled: Prefill, elements: str, batch: int, length: int
) -> dict[str, Any]:
    """Return a table row: prompts at all latencies."""
    tile = compiled.tile
    pairs = batch * length * (length + 1) // 2  # of rows and tokens
    heads = LLAMA.kv_heads * LLAMA.heads_per_kv
    least = 4 * LLAMA.head_dim * pairs * heads / PEAK * 1e6
    step = walk(compiled.loop, 0)
    row: dict[str, Any] = {
        "elements": elements,
        "prompts": f"{batch} x {length}",
        "rows x tokens, warps, stages": f"{tile.rows} x {tile.tokens}, "
        f"{tile.num_warps}, {tile.num_stages}",
        "next tile carried": Techniques.CARRIED in tile.ways,
        "weights in pairs": Techniques.EXP2_IN_PAIRS in tile.ways,
        "registers": compiled.registers,
        "waves": compiled.programs * tile.num_warps,
        "cycles of a step: matrix": step.matrix_cycles,
        "of vectors": step.vector_cycles,
        "of shared memory": step.shared_cycles,
        "without latency": step.cycles,
        "least": round(least),
    }
    for latency in PROMPT_LATENCIES:
        bounds = estimate_prefill(compiled, batch, length, latency)
        longest = max(bounds, key=lambda name: bounds[name])
        row |= {name: round(bounds[name]) for name in ("matrix", "vector", "shared")}
        row[f"latency, {latency} ns"] = round(bounds["latency"])
        row[f"limit, {latency} ns"] = longest
        row[f"share, {latency} ns"] = round(least / bounds[longest], 3)
    return row


def list_forks(is_quick: bool) -> list[dict[str, Any]]:
    """Return the rows of sequences with a shared prompt: without and with sharing."""
    rows = []
    for model in FORKED[1:2] if is_quick else FORKED:
        for has_lanes in (False, True):
            compiled = compile_decode(ELEMENTS[0], model, has_lanes=has_lanes)
            for batch, shared in FORKS[:1] if is_quick else FORKS:
                call = batch, shared + OWN_TOKENS, shared if has_lanes else 0
                row = {"query heads of a kv head": model.heads_per_kv}
                row |= {"shared": shared, "read once": has_lanes}
                rows.append(row | describe(compiled, ELEMENTS[0], *call))
    return rows


def list_prefill(is_quick: bool) -> list[dict[str, Any]]:
    """Return the rows of prefill: with the previous tile and the current one."""
    rows = []
    for elements in PROMPT_ELEMENTS[:1] if is_quick else PROMPT_ELEMENTS:
        for tile in (BEFORE, None):
            compiled = compile_prefill(elements, tile)
            for batch, length in PROMPTS[:1] if is_quick else PROMPTS:
                rows.append(describe_prefill(compiled, elements, batch, length))
    return rows


def main() -> None:
    """Print the estimates, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one call, nothing kept")
    options = parser.parse_args()
    where = harness.machine() | {"target": TARGET}
    print(harness.header("jkv: the kernels on MI300X, a model", where))
    rows = []
    kinds = [(LLAMA, each, carried) for each in ELEMENTS for carried in (False, True)]
    kinds += [(LLAMA, FOUR_BITS, False), (DEEPSEEK, ELEMENTS[0], True)]
    for model, elements, is_carried in kinds[:1] if options.quick else kinds:
        compiled = compile_decode(elements, model, is_carried=is_carried)
        for batch, context in CALLS[:1] if options.quick else CALLS:
            rows.append(describe(compiled, elements, batch, context))
    print(harness.table(rows, {key: key for key in rows[0]}))
    forks = list_forks(options.quick)
    print(harness.table(forks, {key: key for key in forks[0]}))
    prompts = list_prefill(options.quick)
    print(harness.table(prompts, {key: key for key in prompts[0]}))
    if not options.quick:
        run = {"benchmark": "kernel_model", "machine": where, "unit": "us"}
        harness.save(RESULTS, run | {"rows": rows, "forks": forks, "prompts": prompts})
        print(f"\nwritten to {RESULTS.name}")


if __name__ == "__main__":
    main()

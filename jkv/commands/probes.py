"""Checks of `jkv.doctor --first-light`, by name, run in child processes.

A check returns its result, raises `NotImplementedError` if it does not apply, and
another error for a failure.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.commands import bookkeeping, correctness, stores
from jkv.commands.children import answer
from jkv.commands.facts import collect_facts
from jkv.commands.report import Try
from jkv.inspection.invariants import check
from jkv.making.initialization import init
from jkv.state import Cache
from jkv.verbs.allocation import allocate
from jkv.verbs.appending import append
from jkv.verbs.writing import write

# Names used by the command.
MACHINE, DRAWS, LOOPS = "machine", "drawn numbers", "loops of small kernels"

NUM_REPLAYS, NUM_TRIPS = 200, 4

# A step of many short sequences over a large pool.
MANY = dataclasses.replace(
    bookkeeping.SIZES,
    num_layers=1,
    num_blocks=2**15,
    max_sequences=2**10,
    max_context_length=2**10,
)
NUM_APPENDED = 8  # tokens of each sequence

# Some products are wrong beyond 2^19 rows.
TALL = 600_000, 64, 16

# Cases in other dtypes; bfloat16 has all.
OTHER_CASES = "decode", "prefill", "mixed, with padding"

PROMPT = (
    "The with statement",
    "--max-new-tokens",
    "24",
    "--temperature",
    "0",
    "--json",
)


def list_tries(*, is_on_cpu: bool) -> dict[str, Try]:
    """Return the checks in order; on a CPU the kernel is interpreted, and slow."""
    tries: dict[str, Try] = {
        MACHINE: collect_facts,
        DRAWS: draw_numbers,
        LOOPS: replay_loops,
        "scatters of a step": scatter_many,
        "a tall product": multiply_tall,
        "a donated step in place": bookkeeping.check_in_place,
        **{f"kernel: {name}": each for name, each in _list_kernels(is_on_cpu)},
        "generate": compare_completions,
    }
    if not is_on_cpu:
        cases = correctness.select_cases("triton", is_quick=True)
        lowered = correctness.list_tries("triton", "bfloat16", cases)
        tries |= {f"jkv's own lowering: {name}": lowered[name] for name in lowered}
    return tries


def _list_kernels(is_on_cpu: bool) -> Iterator[tuple[str, Try]]:
    """Yield comparisons of the kernels with references."""
    for dtype in ("float32",) if is_on_cpu else correctness.TOLERANCES:
        wanted = correctness.QUICK_INTERPRETED if is_on_cpu else OTHER_CASES
        cases = correctness.CASES
        if dtype != "bfloat16":
            cases = tuple(each for each in cases if each.name in wanted)
        tries = correctness.list_tries("pallas", dtype, cases)
        yield from ((f"{name}, {dtype}", each) for name, each in tries.items())
    if not is_on_cpu:
        for name, each in stores.list_tries().items():
            yield f"rows stored, {name}", each
        for name, each in correctness.list_derived("pallas").items():
            yield f"derivative, {name}", each


def draw_numbers() -> None:
    """Draw random bits as in sampling, through the plugin's FFI handlers."""
    compare_bits(lambda key: jax.random.bits(key, (4096,)), jax.random.key(0))


def replay_loops() -> str:
    """Replay jitted loops of verbs many times, with a host argument each time."""

    @jax.jit
    def play(start: jax.Array, cache: Cache) -> Cache:
        return jax.lax.fori_loop(
            start, start + NUM_TRIPS, bookkeeping.play_cycle, cache
        )

    here, cpu = find_devices()
    caches = [jax.device_put(init(bookkeeping.SIZES), each) for each in (here, cpu)]
    for start in range(NUM_REPLAYS):
        found, wanted = (
            play(jax.device_put(np.int32(start), device), cache)
            for device, cache in zip((here, cpu), caches, strict=True)
        )
        require_equal(found, wanted, f"in replay {start} ")
    return f"{NUM_REPLAYS} replays"


def scatter_many() -> None:
    """Append and write a thousand sequences at once."""

    def step(seq_rows: jax.Array) -> Cache:
        num = MANY.max_sequences
        cache, opened = allocate(init(MANY), jnp.arange(num, dtype=jnp.int32) % 200)
        capacity = num * NUM_APPENDED
        count = jnp.full((num,), NUM_APPENDED, jnp.int32)
        cache, batch = append(cache, opened.seq_ids, count, capacity=capacity)
        return write(cache, 0, batch, seq_rows, seq_rows)

    shape = MANY.max_sequences * NUM_APPENDED, MANY.num_kv_heads, MANY.head_dim
    rows = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    check(compare_bits(step, rows))


def multiply_tall() -> None:
    """Multiply more rows than some libraries support, with exact integers."""
    rows, inner, columns = TALL
    random = np.random.default_rng(0)
    left, right = (
        random.integers(-4, 5, shape).astype(np.float32)
        for shape in ((rows, inner), (inner, columns))
    )
    found = np.asarray(jax.jit(jnp.matmul)(left, right))
    wrong = np.flatnonzero((found != left @ right).any(axis=1))
    if wrong.size:
        raise ValueError(f"{wrong.size} of {rows} rows differ, from {wrong[0]} on")


def compare_completions() -> str:
    """Generate from a prompt with the bundled model, on the device and on the CPU."""
    program = pathlib.Path(jkv.__file__).parents[1] / "examples" / "generate.py"
    if not program.exists():
        raise NotImplementedError("the bundled model requires a checkout")
    precise = os.environ | {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    completions = []
    for environment in (precise, precise | {"JAX_PLATFORMS": "cpu"}):
        ran = subprocess.run(
            [sys.executable, str(program), *PROMPT],
            env=environment,
            capture_output=True,
            text=True,
        )
        if ran.returncode:
            errors = ran.stderr.strip().splitlines() or [""]
            raise ValueError(f"ended with status {ran.returncode}: {errors[-1]}")
        completions.append(json.loads(ran.stdout.splitlines()[-1])["text"])
    if completions[0] != completions[1]:
        raise ValueError(f"{completions[0]!r} instead of {completions[1]!r}")
    return f"{completions[0]!r}"


def compare_bits(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result on the device; raise if the CPU's bits differ."""
    here, cpu = (
        jax.jit(function)(*jax.device_put(arguments, device))
        for device in find_devices()
    )
    require_equal(here, cpu)
    return here


def require_equal(found: Any, wanted: Any, when: str = "") -> None:
    """Compare all bits; raise with the name of the first array that differs."""
    for (path, leaf), other in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        if np.asarray(leaf).tobytes() != np.asarray(other).tobytes():
            name = jax.tree_util.keystr(path) or "the result"
            raise ValueError(f"wrong numbers: {when}{name} is not the CPU's")


def find_devices() -> tuple[Any, Any]:
    """Return the device and the CPU; raise if JAX_PLATFORMS excludes the CPU."""
    try:
        return jax.devices()[0], jax.devices("cpu")[0]
    except RuntimeError as error:
        if jax.devices():
            raise NotImplementedError(f"JAX offers no CPU here: {error}") from error
        raise


if __name__ == "__main__":
    every = list_tries(is_on_cpu=True) | list_tries(is_on_cpu=False)
    answer(every, sys.argv[1:])

"""Size of the programs: operations, fusions, scatters and compile time of each verb.

    python benchmarks/programs.py [--only append free] [--loops] [--sources append]

The verbs are lowered for a cache of two layers, 64 sequences and 1,024 blocks, with 8
requests, with and without prefix caching. A StableHLO operation costs tracing and
compiling; a fusion is a launch on a GPU. `--sources VERB` lists the lines of jkv with
the most operations. `tests/package/test_programs.py` limits the counts.
"""

import argparse
import collections
import functools
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp

import jkv

NUM_REQUESTS = 8
SIZES = dict(
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    num_blocks=1024,
    max_sequences=64,
    max_context_length=512,
)
KINDS = {
    "plain": jkv.CacheConfig(**SIZES),
    "prefix caching": jkv.CacheConfig(**SIZES, prefix_caching=True),
}


class Size(NamedTuple):
    """Size of a program."""

    operations: int  # of StableHLO
    fusions: int  # of the compiled module
    scatters: int  # of the compiled module
    loops: int  # of the compiled module; on a GPU the host waits for each condition
    seconds: float  # CPU time of compiling


def make_verbs(kind: str) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return functions of a cache, each with its arguments, by verb."""
    cache = jax.eval_shape(functools.partial(jkv.init, KINDS[kind]))
    ids = jax.ShapeDtypeStruct((NUM_REQUESTS,), jnp.int32)
    prompts = jax.ShapeDtypeStruct((NUM_REQUESTS, 64), jnp.int32)
    is_indexed = kind != "plain"
    batch = jax.eval_shape(lambda cache, ids: jkv.append(cache, ids), cache, ids)[1]
    queries = jax.ShapeDtypeStruct((NUM_REQUESTS, 4, 16), jnp.float32)

    def append(cache: jkv.Cache, ids: jax.Array, tokens: Any = None) -> Any:
        return jkv.append(cache, ids, tokens=tokens)

    verbs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "append": (append, (cache, ids, ids) if is_indexed else (cache, ids)),
        "allocate": (jkv.allocate, (cache, ids)),
        "commit": (jkv.commit, (cache, batch)),
        "fork": (jkv.fork, (cache, ids)),
        "free": (jkv.free, (cache, ids)),
        "truncate": (jkv.truncate, (cache, ids, ids)),
        "reorder": (jkv.reorder, (cache, ids, ids)),
        "attend": (
            lambda cache, batch, queries: jkv.attend(cache, 0, batch, queries),
            (cache, batch, queries),
        ),
    }
    if is_indexed:
        verbs["allocate, tokens"] = (
            lambda cache, counts, tokens: jkv.allocate(cache, counts, tokens=tokens),
            (cache, ids, prompts),
        )
    return verbs


def make_loop(kind: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return `generate` with a model that neither writes nor attends."""

    def model(params: Any, tokens: Any, cache: Any, batch: Any) -> Any:
        del params
        return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache

    cache = jax.eval_shape(functools.partial(jkv.init, KINDS[kind]))
    prompts = jax.ShapeDtypeStruct((NUM_REQUESTS, 64), jnp.int32)
    return (
        lambda cache, prompts: jkv.generate(
            model, None, cache, prompts, max_new_tokens=16, max_running=NUM_REQUESTS
        ),
        (cache, prompts),
    )


def count_operations(text: str) -> int:
    """Return the number of operations in the text of a StableHLO module."""
    return len(re.findall(r"^\s+(?:%\S+(?:, %\S+)* = )?\"?stablehlo\.", text, re.M))


def measure(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Size:
    """Lower and compile a function; return its size."""
    lowered = jax.jit(function).lower(*arguments)
    began = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - began
    lines = (compiled.as_text() or "").splitlines()
    fusions = sum(" fusion(" in line for line in lines)
    scatters = sum(re.search(r" scatter\(", line) is not None for line in lines)
    loops = sum(re.search(r" while\(", line) is not None for line in lines)
    operations = count_operations(lowered.as_text())
    return Size(operations, fusions, scatters, loops, seconds)


def list_sources(
    function: Callable[..., Any], arguments: tuple[Any, ...], depth: int
) -> list[tuple[int, str]]:
    """Return the number of jaxpr equations of each line of jkv, most first."""
    counts: collections.Counter[str] = collections.Counter()

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            inner = [
                each
                for value in equation.params.values()
                for each in (value if isinstance(value, tuple | list) else (value,))
                if hasattr(each, "eqns") or hasattr(each, "jaxpr")
            ]
            for each in inner:
                visit(getattr(each, "jaxpr", each))
            if not inner:
                trace = equation.source_info.traceback
                frames = [
                    f"{frame.file_name.split('/jkv/')[-1]}:{frame.line_num}"
                    for frame in (trace.frames if trace else ())
                    if "/jkv/" in frame.file_name
                ]
                counts[" < ".join(frames[:depth])] += 1

    visit(jax.make_jaxpr(function)(*arguments).jaxpr)
    return [(count, place) for place, count in counts.most_common()]


def main() -> None:
    """Print the sizes of the selected programs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="VERB")
    parser.add_argument("--loops", action="store_true", help="generate as well")
    parser.add_argument("--sources", metavar="VERB", help="places, instead of sizes")
    parser.add_argument("--depth", type=int, default=1, help="frames of a place")
    options = parser.parse_args()
    print(harness.header("Sizes of programs", harness.machine()))
    rows = []
    for kind in KINDS:
        programs = make_verbs(kind)
        if options.loops or options.sources == "generate":
            programs["generate"] = make_loop(kind)
        if options.sources:
            function, arguments = programs[options.sources]
            print(kind)
            for count, place in list_sources(function, arguments, options.depth)[:60]:
                print(f"{count:5} {place}")
            continue
        for name, (function, arguments) in programs.items():
            if not options.only or name in options.only:
                size = measure(function, arguments)
                rows.append({"verb": name, "cache": kind, **size._asdict()})
    if rows:
        print(harness.table(rows, {key: key for key in rows[0]}))


if __name__ == "__main__":
    main()

"""Kernel launches of a model's decode step, counted in the compiled program.

The step is only compiled, so its shapes may be a real model's.

    python benchmarks/launches.py    # on a GPU
"""

import functools
import re
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jkv.config.cache_config import CacheConfig
from jkv.making.initialization import init
from jkv.state import Cache
from jkv.verbs.appending import append
from jkv.verbs.attending import attend
from jkv.verbs.writing import commit, write

# Attention shapes of Llama 3 8B, with fewer layers, and 2 GiB of cache.
SIZES = CacheConfig(
    num_layers=8,
    num_kv_heads=8,
    head_dim=128,
    num_blocks=4096,
    block_size=16,
    max_sequences=64,
    max_context_length=8192,
)
NUM_HEADS = 32

# Loop counter, store, attention pieces and their combination, as in XLA's module for
# MI300X (`benchmarks/rocm_compile.py`).
MOST_LAUNCHES = 4

_LAUNCH = re.compile(r" (?:fusion|custom-call|copy)\(")
_CALLED = re.compile(r" call\(.*to_apply=%?([\w.-]+)")


def main() -> int:
    """Print the step's launches; return 1 if there are too many or copies."""
    compiled = compile_step()
    faults = list(find_faults(compiled))
    for line in find_launches(compiled.as_text() or "") or ():
        print(line.strip()[:120])
    print("\n".join(faults) or "in place, with few launches")
    return 1 if faults else 0


def find_faults(compiled: jax.stages.Compiled) -> Iterator[str]:
    """Yield violations of a compiled step."""
    temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
    cache = jax.eval_shape(functools.partial(init, SIZES))
    pool = cache.storage[0].key_pool
    layer_bytes = pool.size * pool.dtype.itemsize // SIZES.num_layers
    if temporary >= layer_bytes:
        yield f"{temporary:,} bytes beside {layer_bytes:,} of a layer's keys"
    lines = find_launches(compiled.as_text() or "")
    if lines is None:
        yield "no loop over layers has kernels"
    elif len(lines) > MOST_LAUNCHES:
        yield f"{len(lines)} launches for each layer, {MOST_LAUNCHES} for MI300X"


def compile_step() -> jax.stages.Compiled:
    """Compile a step of one token per sequence, with a donated cache."""

    def decode(
        cache: Cache, seq_ids: jax.Array, queries: jax.Array, rows: jax.Array
    ) -> tuple[Cache, jax.Array]:
        cache, batch = append(cache, seq_ids)

        def layer_step(
            layer: jax.Array, carry: tuple[Cache, jax.Array]
        ) -> tuple[Cache, jax.Array]:
            cache, queries = carry
            cache = write(cache, layer, batch, rows, rows)
            return cache, attend(cache, layer, batch, queries)

        carry = cache, queries
        cache, output = jax.lax.fori_loop(0, SIZES.num_layers, layer_step, carry)
        return commit(cache, batch), output

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    given = (
        jax.eval_shape(functools.partial(init, SIZES)),
        jax.ShapeDtypeStruct((SIZES.max_sequences,), jnp.int32),
        shape((SIZES.max_sequences, NUM_HEADS, SIZES.head_dim)),
        shape((SIZES.max_sequences, SIZES.num_kv_heads, SIZES.head_dim)),
    )
    return jax.jit(decode, donate_argnums=0).lower(*given).compile()


def find_launches(text: str) -> list[str] | None:
    """Return the launches per trip of the loop over layers, one line each.

    Args:
      text: of `jax.stages.Compiled.as_text` for a GPU.

    Returns:
      A line per launch, including those in called computations (XLA outlines some for a
      CUDA or HIP graph); None without a loop that has kernels.
    """
    computations = _split_computations(text)

    def list_launches(name: str) -> list[str]:
        found = []
        for line in computations.get(name, ()):
            called = _CALLED.search(line)
            if called is not None:
                found += list_launches(called[1])
            elif _LAUNCH.search(line):
                found.append(line)
        return found

    bodies = [list_launches(name) for name in re.findall(r"body=%?([\w.-]+)", text)]
    most = max(bodies, key=_count_kernels, default=[])
    return most if _count_kernels(most) else None


def _count_kernels(lines: list[str]) -> int:
    return sum(" custom-call(" in line for line in lines)


def _split_computations(text: str) -> dict[str, list[str]]:
    """Return the lines of each computation, by name."""
    computations: dict[str, list[str]] = {}
    for part in text.split("\n\n"):
        head, *lines = part.strip().splitlines() or [""]
        name = re.match(r"(?:ENTRY )?%?([\w.-]+) ", head)
        if name is not None:
            computations[name[1]] = lines
    return computations


if __name__ == "__main__":
    sys.exit(main())

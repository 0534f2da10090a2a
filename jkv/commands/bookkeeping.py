"""Checks of block accounting and of in-place updates on the device."""

import jax
import jax.numpy as jnp

from jkv.config.cache_config import CacheConfig
from jkv.inspection.invariants import check
from jkv.making.initialization import init
from jkv.state import Cache
from jkv.verbs.allocation import allocate, free
from jkv.verbs.appending import append
from jkv.verbs.branching import fork, truncate
from jkv.verbs.lookups import num_free_blocks
from jkv.verbs.writing import write

NUM_CYCLES = 500
CYCLES = f"{NUM_CYCLES} cycles of allocate, append, write, fork, truncate, free"
IN_PLACE = "donated writes in place"

SIZES = CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=64,
    num_blocks=64,
    block_size=4,
    max_sequences=8,
    max_context_length=64,
)


def check_cycles() -> None:
    """Run cycles of verbs in one donated jit, then check all invariants."""

    def play(cache: Cache) -> Cache:
        # A new function is traced again, which tests of patched verbs rely on.
        return jax.lax.fori_loop(0, NUM_CYCLES, lambda i, c: play_cycle(i, c), cache)

    cache = jax.jit(play, donate_argnums=0)(init(SIZES))
    check(cache)
    if num_lost := SIZES.num_blocks - int(num_free_blocks(cache)):
        raise ValueError(f"all blocks must be free, got {num_lost} lost ones")


def play_cycle(number: jax.Array, cache: Cache) -> Cache:
    """Open two sequences of varying lengths, fork them, and free all four."""
    cache, opened = allocate(cache, jnp.stack([number % 9, number % 5]))
    cache, batch = append(cache, opened.seq_ids, number % 8, capacity=16)
    rows = jnp.full((16, SIZES.num_kv_heads, SIZES.head_dim), number, jnp.bfloat16)
    for layer in range(SIZES.num_layers):
        cache = write(cache, layer, batch, rows, rows)
    cache, forked = fork(cache, opened.seq_ids)
    cache, _ = truncate(cache, forked.seq_ids, number % 3)
    cache, _ = free(cache, opened.seq_ids)
    return free(cache, forked.seq_ids)[0]


def check_in_place() -> str:
    """Check in the compiler's memory analysis that a donated write copies no pool."""
    cache, opened = allocate(init(SIZES), [0, 0])
    cache, batch = append(cache, opened.seq_ids)
    rows = jnp.ones((2, SIZES.num_kv_heads, SIZES.head_dim), jnp.bfloat16)
    step = jax.jit(write, donate_argnums=0)
    compiled = step.lower(cache, 1, batch, rows, rows).compile()
    temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
    if temporary is None:
        raise NotImplementedError("the compiler has no memory analysis")
    pool_bytes = cache.storage[0].key_pool.nbytes
    found = f"{temporary:,} bytes beside a pool of {pool_bytes:,}"
    if temporary >= pool_bytes // 4:
        raise ValueError(found)
    return found

"""Comparison of the storing kernel with scatters on this GPU.

The bits agree, except for quantized elements: a few may be one unit apart.

Rows stored wrongly would corrupt every result, so a failure names the setting that
disables the kernel.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attention.backend import SlotWrite
from jkv.attention.choice import find_stores, scatter
from jkv.commands.correctness import on_cpu
from jkv.commands.report import Try
from jkv.formats.format import Formats, name_parts
from jkv.formats.scaled import Scaled, count_units_apart
from jkv.formats.table import FORMATS
from jkv.verbs.writing import WRITE_SWITCH, may_use_kernel

NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, NUM_ROWS, NUM_STEPS = 3, 16, 2, 24, 4

# Of rounded elements, how many may be one unit apart (`jkv.formats.scaled`).
MOST_APART = 1e-3

ALL = "rows stored by the kernel"

Store = Callable[[SlotWrite], dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Case:
    """Dtypes and head dims of the rows to store."""

    name: str
    head_dims: tuple[int, int]
    block_size: int = 16
    dtype: str = "bfloat16"  # of keys and values
    value_dtype: str | None = None  # of values, if different
    has_parts: bool = False  # only the second half of each block is local


CASES = (
    Case("bfloat16", (128, 128)),
    Case("values of another head dim", (96, 72), block_size=24),
    Case("float16", (128, 128), dtype="float16"),
    Case("float32", (128, 72), dtype="float32"),
    Case("int8", (128, 128), dtype="int8"),
    Case("e4m3fn", (64, 96), dtype="float8_e4m3fn"),
    Case("e4m3fnuz", (128, 128), dtype="float8_e4m3fnuz"),
    Case("e5m2", (72, 72), dtype="float8_e5m2"),
    Case("int8, int4", (128, 128), dtype="int8", value_dtype="int4"),
    Case("parts of blocks", (64, 64), has_parts=True),
)


def list_tries() -> dict[str, Try]:
    """Return the comparisons by case name."""
    return {case.name: functools.partial(compare, case) for case in CASES}


def compare(case: Case, store: Store | None = None) -> str:
    """Store rows by the kernel and by scatters; raise if the arrays differ."""
    write = draw_write(case)
    stores = [*find_stores(write).values()] if store is None else [store]
    if not stores:
        where = "there is no GPU here" if on_cpu() else "scatters store them here"
        raise NotImplementedError(where)
    wanted, found = play(write, scatter), play(write, stores[0])
    rounded = {
        f"{row}_pool": kept.dtype
        for row, kept in zip(("key", "value"), write.formats, strict=True)
        if isinstance(kept, Scaled)
    }
    wrong, num_apart = [], 0
    for name, array in wanted.items():
        one, other = np.asarray(found[name]), np.asarray(array)
        if one.tobytes() == other.tobytes():
            continue
        if name in rounded:
            apart = count_units_apart(one, other, rounded[name])
            if apart.max() <= 1 and np.mean(apart > 0) <= MOST_APART:
                num_apart += int(np.sum(apart))
                continue
        wrong.append(name)
    if wrong:
        raise ValueError(
            f"{' and '.join(wrong)} must have the bits of scatters, got others; set "
            f"{WRITE_SWITCH}=0 in the environment to use scatters"
        )
    used = "" if may_use_kernel() else f", which {WRITE_SWITCH}=0 keeps out"
    rounding = f", {num_apart} elements one unit apart" if num_apart else ""
    return f"the bits of scatters{rounding}{used}"


def play(write: SlotWrite, store: Store) -> dict[str, jax.Array]:
    """Return the arrays after some steps over all layers, updated in place."""

    def step(arrays: dict[str, jax.Array], write: SlotWrite) -> dict[str, jax.Array]:
        def store_layer(
            index: jax.Array, arrays: dict[str, jax.Array]
        ) -> dict[str, jax.Array]:
            number = index // NUM_LAYERS
            moved = {
                name: jnp.roll(rows, number, axis=0)
                for name, rows in write.rows.items()
            }
            return store(
                dataclasses.replace(
                    write,
                    arrays=arrays,
                    rows=moved,
                    layer=index % NUM_LAYERS,
                    block_ids=(write.block_ids + number) % (NUM_BLOCKS + 1),
                )
            )

        return jax.lax.fori_loop(0, NUM_LAYERS * NUM_STEPS, store_layer, arrays)

    own = {name: jnp.array(array) for name, array in write.arrays.items()}
    return jax.jit(step, donate_argnums=0)(own, write)


def draw_write(case: Case) -> SlotWrite:
    """Return rows of random bits, some without a slot, and arrays of others."""
    random = np.random.default_rng(0)
    common = NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, case.block_size
    dtypes = map(jnp.dtype, (case.dtype, case.value_dtype or case.dtype))
    formats = Formats(*(FORMATS[each] for each in dtypes))

    def draw(shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.Array:
        drawn = random.bytes(math.prod(shape) * dtype.itemsize)
        return jnp.asarray(np.frombuffer(drawn, dtype).reshape(shape))

    arrays: dict[str, jax.Array] = {}
    rows = {}
    sides = zip(("key", "value"), formats, case.head_dims, strict=True)
    for row, kept, head_dim in sides:
        given = kept.dtype
        if kept.is_quantized:
            given = np.dtype(jnp.float32 if kept.is_turned else jnp.bfloat16)
        name, elements = f"{row}_pool", name_parts(row, kept.arrays(head_dim))
        arrays |= {n: draw((*common, *e.shape), e.dtype) for n, e in elements.items()}
        rows[name] = draw((NUM_ROWS, NUM_KV_HEADS, head_dim), given)
        if kept.is_quantized:
            # Half of the rows have no NaN, with values of different magnitudes.
            numbers = random.standard_normal(rows[name].shape) ** 5
            rows[name] = rows[name].at[::2].set(jnp.asarray(numbers[::2], given))
    num_tokens = case.block_size * (2 if case.has_parts else 1)
    slots = random.permutation(NUM_BLOCKS * num_tokens)[:NUM_ROWS]
    return SlotWrite(
        arrays=arrays,
        rows=rows,
        layer=jnp.int32(0),
        block_ids=jnp.asarray(slots // num_tokens, jnp.int32),
        offsets=jnp.asarray(slots % num_tokens, jnp.int32),
        valid=jnp.asarray(np.arange(NUM_ROWS) % 5 != 1),
        part=jnp.int32(1) if case.has_parts else None,
        formats=formats,
    )

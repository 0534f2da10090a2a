"""Workarounds for XLA's CPU runtime, explained once and named where they are used.

None changes a result; on other devices they cost nothing.

* **Stages** (`stage`). XLA on CPU runs every operation that is ready. With more than
  eight ready it hands half of them to another thread and waits for that thread to wake
  up, which takes longer than bookkeeping on a thousand integers. It runs a computation
  of at most eight operations in order (`ThunkExecutor` has both limits). Parts of the
  verbs with many ready operations are therefore separate computations of about that
  size, which are not inlined.
* **Sums of masked tiles** (`running_sum`). XLA on CPU compiles a `cumsum` to nine small
  loops, sums of masked tiles to four.
* **Truncating division** (`divide`). XLA considers the corrections of a floor division
  worth a second thread, which costs far more than they do.
* **Write after read** (`written_after`). XLA copies an array if it cannot prove that a
  read comes before a write. An index computed from the value read proves it.
* **The same kernels for all layers** (`unknown`). XLA on CPU compiles equal fusions
  once. With a constant layer index each layer of an unrolled model would have its own
  fusions, and compile time dominates startup.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from jkv.sharding.loops import vary_over, varying_axes

P = ParamSpec("P")
T = TypeVar("T")

# Size and number of tiles of a running sum: work grows with both.
_TILE = 16
_MAX_TILES = 128


def stage(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function as a separate computation on CPU.

    It takes and returns pytrees of arrays; keyword arguments are static. Arrays
    returned unchanged stay outside the computation, so a stage may take and return the
    whole metadata. On other devices it is the plain function.
    """

    @functools.wraps(function)
    def staged(*args: P.args, **static: P.kwargs) -> T:
        leaves, structure = jax.tree.flatten(args)
        # Filled by tracing: the result's structure, and for each leaf the index of the
        # argument returned unchanged, or None.
        result, origins = structure, list[int | None]()

        def compute(*leaves: jax.Array) -> list[jax.Array]:
            nonlocal result, origins
            index = {id(leaf): i for i, leaf in enumerate(leaves)}
            answer = function(*jax.tree.unflatten(structure, leaves), **static)
            outputs, result = jax.tree.flatten(answer)
            origins = [index.get(id(output)) for output in outputs]
            return [output for output in outputs if id(output) not in index]

        def inlined(*leaves: jax.Array) -> list[jax.Array]:
            with set_xla_metadata(inlineable=None):
                return compute(*leaves)

        inlined.__name__ = function.__name__

        def as_stage(*leaves: jax.Array) -> list[jax.Array]:
            with set_xla_metadata(inlineable="false"):
                return jax.jit(inlined)(*leaves)

        computed = iter(
            jax.lax.platform_dependent(*leaves, cpu=as_stage, default=compute)
        )
        return jax.tree.unflatten(
            result, [next(computed) if i is None else leaves[i] for i in origins]
        )

    return staged


def running_sum(counts: jax.Array) -> jax.Array:
    """Return the inclusive running sum of counts, i32[P], as `cumsum` does."""
    size = counts.shape[0]
    if size <= _TILE:
        earlier = np.triu(np.ones((size, size), bool))
        return jnp.sum(jnp.where(earlier, counts[:, None], 0), axis=0, dtype=jnp.int32)
    if size > _TILE * _MAX_TILES:
        return jnp.cumsum(counts, dtype=jnp.int32)
    tiles = jnp.pad(counts, (0, -size % _TILE)).reshape(-1, _TILE)
    upto = np.triu(np.ones((_TILE, _TILE), bool))[None]  # [1, from, to]
    within = jnp.sum(jnp.where(upto, tiles[:, :, None], 0), axis=1, dtype=jnp.int32)
    earlier = np.triu(np.ones((len(tiles), len(tiles)), bool), 1)
    totals = jnp.where(earlier, within[:, -1][:, None], 0)
    before = jnp.sum(totals, axis=0, dtype=jnp.int32)
    return (within + before[:, None]).reshape(-1)[:size]


def divide(numbers: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Return quotient and remainder of i32[...], rounded towards zero."""
    divisor = jnp.int32(size)
    return jax.lax.div(numbers, divisor), jax.lax.rem(numbers, divisor)


def written_after(was_read: jax.Array, index: jax.Array, nothing: int) -> jax.Array:
    """Return the index of a write, i32[P], that depends on a read of the same array.

    `was_read`, bool[P], is computed from the values read; False drops the write.
    """
    return jnp.where(was_read, index, nothing)


def unknown(number: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return a number, i32[], whose value XLA on CPU cannot constant-fold."""
    if lengths.shape[0] == 0:
        return number
    nothing = lengths[0]
    number = vary_over(jnp.asarray(number), varying_axes(nothing))
    return jax.lax.platform_dependent(
        number, nothing, cpu=_add_nothing, default=lambda number, _: number
    )


@stage
def _add_nothing(number: jax.Array, length: jax.Array) -> jax.Array:
    """Return the number; a stage keeps the addition out of every fusion."""
    return number + jnp.minimum(length, 0)

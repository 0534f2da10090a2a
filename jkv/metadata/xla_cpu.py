"""What XLA's CPU runtime asks for, explained once; the logic names what it uses.

None of it changes a result, and on other devices it costs nothing.

* **Stages** (`stage`). XLA on CPU runs what is ready. With more than eight operations
  ready at once it hands half of them to another thread, and the caller then waits for
  that thread to wake up, which takes longer than the bookkeeping's operations on a
  thousand integers each. A computation of at most eight operations it runs in order
  (`ThunkExecutor` in XLA's CPU runtime has both limits). So the parts of the verbs that
  would make many operations ready at once are computations of about that size which
  are not inlined.
* **Sums of masked tiles** (`running_sum`). XLA on CPU turns a `cumsum` into nine small
  loops, sums of masked tiles into four.
* **Truncating division** (`divide`). XLA takes the corrections of a floor division for
  work that is worth a second thread, which costs far more than they do.
* **What is read is written after** (`written_after`). XLA keeps a copy of an array for
  a read that it cannot prove to come before a write. Where the index of the write is
  made from what was read, it can.
* **One layer's kernels for all layers** (`unknown`). XLA on CPU compiles equal fusions
  once, and compiling is what a start costs. With the layer as a constant inside them
  each layer of an unrolled model would have fusions of its own.
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

# Tiles of a running sum: work is 16 a count, and more tiles than this cost too much.
_TILE = 16
_MAX_TILES = 128


def stage(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function a stage.

    It takes and returns pytrees of arrays; arguments by keyword are static. Arrays that
    it returns as it got them stay outside the computation, so that a stage may take and
    return the whole metadata. On devices other than a CPU it is the plain function.
    """

    @functools.wraps(function)
    def staged(*args: P.args, **static: P.kwargs) -> T:
        leaves, structure = jax.tree.flatten(args)
        # What tracing finds out: the result's structure, and which argument, if any,
        # each of its leaves is.
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
    """Return the sum of counts, i32[P], up to and with each one, as `cumsum` does."""
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
    """Return quotient and rest of i32[...], rounded towards zero."""
    divisor = jnp.int32(size)
    return jax.lax.div(numbers, divisor), jax.lax.rem(numbers, divisor)


def written_after(was_read: jax.Array, index: jax.Array, nothing: int) -> jax.Array:
    """Return the index of a write, i32[P], that comes after a read of the same array.

    `was_read`, bool[P], is made from what was read; False where nothing is to be
    written.
    """
    return jnp.where(was_read, index, nothing)


def unknown(number: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return a number, i32[], perhaps constant, that XLA on CPU does not know."""
    if lengths.shape[0] == 0:
        return number
    nothing = lengths[0]
    number = vary_over(jnp.asarray(number), varying_axes(nothing))
    return jax.lax.platform_dependent(
        number, nothing, cpu=_add_nothing, default=lambda number, _: number
    )


@stage
def _add_nothing(number: jax.Array, length: jax.Array) -> jax.Array:
    """Return the number; a stage, or its addition would be part of every fusion."""
    return number + jnp.minimum(length, 0)

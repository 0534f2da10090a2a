"""Checks of each collective between the devices, in child processes.

On some pairs of GPUs a collective hangs, and cannot be interrupted from within.
"""

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jkv.commands.children import answer, ask
from jkv.commands.report import Report

# Compilation takes most of it; a collective takes milliseconds.
SECONDS = 60.0

AXIS = "all"

COMMAND = (sys.executable, "-m", "jkv.commands.collectives")

# Collectives on each rank's row, [n], for n ranks.
COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all-reduce": lambda row: jax.lax.psum(row, AXIS),
    "all-gather": lambda row: jax.lax.all_gather(row, AXIS).reshape(-1),
    "reduce-scatter": lambda row: jax.lax.psum_scatter(row, AXIS, tiled=True),
    "all-to-all": lambda row: jax.lax.all_to_all(row, AXIS, 0, 0, tiled=True),
    "collective-permute": lambda row: jax.lax.ppermute(
        row, AXIS, [(rank, (rank + 1) % len(row)) for rank in range(len(row))]
    ),
}


def check_collectives(report: Report) -> None:
    """Run each collective between all devices, and report the result."""
    if jax.device_count() == 1:
        report.add("not checked", "collectives", "there is one device")
        return
    for found in ask(COMMAND, list(COLLECTIVES), lambda: SECONDS):
        what = f"{found.name} between {jax.device_count()} devices"
        report.add(found.verdict, what, found.detail)


def try_collective(name: str) -> None:
    """Run one collective on all devices; raise if the result differs from numpy's."""
    count = jax.device_count()
    mesh = jax.make_mesh((count,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    rows = np.arange(count * count, dtype=np.float32).reshape(count, count)
    spec = jax.sharding.PartitionSpec(AXIS)
    found = jax.jit(
        jax.shard_map(
            lambda part: COLLECTIVES[name](part[0])[None],
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )(jnp.asarray(rows))
    total = rows.sum(axis=0)
    wanted = {
        "all-reduce": np.tile(total, (count, 1)),
        "all-gather": np.tile(rows.reshape(-1), (count, 1)),
        "reduce-scatter": total[:, None],
        "all-to-all": rows.T,
        "collective-permute": np.roll(rows, 1, axis=0),
    }
    if not np.array_equal(np.asarray(found), wanted[name]):
        raise ValueError(f"{name} returned wrong numbers")


if __name__ == "__main__":
    tries = {name: functools.partial(try_collective, name) for name in COLLECTIVES}
    answer(tries, sys.argv[1:])

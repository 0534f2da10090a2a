"""Whether the devices can talk to each other: each collective, in a child process.

Some pairs of cards never answer each other, and a collective that hangs cannot be
ended from within.
"""

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jkv.commands.children import answer, ask
from jkv.commands.report import Report

# More than compiling one takes; a collective itself takes milliseconds.
SECONDS = 60.0

AXIS = "all"

COMMAND = (sys.executable, "-m", "jkv.commands.collectives")

# What each brings on every rank, of a row [n] per rank, n ranks.
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
    """Try each collective between all devices; say which works."""
    if jax.device_count() == 1:
        report.add("not checked", "collectives", "there is one device")
        return
    for found in ask(COMMAND, list(COLLECTIVES), lambda: SECONDS):
        what = f"{found.name} between {jax.device_count()} devices"
        report.add(found.verdict, what, found.detail)


def try_collective(name: str) -> None:
    """Run one on all devices; raise if it brings something else than numpy."""
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
        raise ValueError(f"{name} brought wrong numbers")


if __name__ == "__main__":
    tries = {name: functools.partial(try_collective, name) for name in COLLECTIVES}
    answer(tries, sys.argv[1:])

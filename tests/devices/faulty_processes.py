"""The program of both processes of `test_engine_faults.py`, until one is killed.

    python faulty_processes.py PROCESS PORT

The first generates endlessly, the second follows. The process that loses the other one
prints it and exits with status 3, unless JAX ends it first.
"""

import os
import sys

import jax
import numpy as np
from serving_processes import Clock, make_engine

HEARTBEAT = 10  # seconds


def go_on(process):
    """Generate endlessly, or follow."""
    mesh = jax.sharding.Mesh(
        np.asarray(jax.devices()), ("heads",), (jax.sharding.AxisType.Auto,)
    )
    engine = make_engine(mesh, Clock(), checks=False)
    if process:
        engine.follow()
    engine.warm_up()
    while True:
        engine.generate([[5, 9], [4]])
        print("under way", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    number, port = map(int, sys.argv[1:])
    address = f"localhost:{port}"
    jax.distributed.initialize(
        address,
        2,
        number,
        coordinator_bind_address=None if number else address,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=HEARTBEAT,
    )
    try:
        go_on(number)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(3)

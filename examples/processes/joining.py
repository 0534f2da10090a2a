"""A process joins the others of its job, and the devices of all become one mesh."""

import argparse

import jax
import numpy as np
from jax.sharding import AxisType


def join(options: argparse.Namespace) -> None:
    """Connect with the other processes, before JAX initializes a device.

    A process that gives no sign of life for `--heartbeat` seconds counts as dead, and
    all others are ended by JAX then, wherever they wait.
    """
    if options.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    # Else SIGTERM is only noted, for programs that ask JAX whether it came.
    jax.config.update("jax_enable_preemption_service", False)
    others = dict(
        coordinator_address=options.coordinator,
        num_processes=options.num_processes,
        process_id=options.process,
    )
    if options.process == 0:
        # Else it listens on all interfaces, and takes orders from any of them.
        others["coordinator_bind_address"] = options.coordinator
    jax.distributed.initialize(
        **({} if options.coordinator == "auto" else others),
        initialization_timeout=60,
        heartbeat_timeout_seconds=options.heartbeat,
        shutdown_timeout_seconds=options.heartbeat,
    )


def make_mesh(num_sharing: int | None) -> jax.sharding.Mesh:
    """Return the devices of all processes; the axis "tp" shares a model.

    Args:
        num_sharing: size of that axis; None for the devices of one process.
    """
    devices = np.asarray(jax.devices())  # devices of a process side by side
    rows = devices.reshape(-1, num_sharing or jax.local_device_count())
    return jax.sharding.Mesh(rows, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)

"""Connection of processes, and the mesh of their devices."""

import argparse

import jax
import numpy as np
from jax.sharding import AxisType


def join(options: argparse.Namespace) -> None:
    """Connect to the other processes; call this before JAX initializes a device.

    A process without a heartbeat for `--heartbeat` seconds counts as dead; JAX then
    ends all other processes, even if they wait.
    """
    if options.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    # With this service, JAX only records SIGTERM and does not exit.
    jax.config.update("jax_enable_preemption_service", False)
    others = dict(
        coordinator_address=options.coordinator,
        num_processes=options.num_processes,
        process_id=options.process,
    )
    if options.process == 0:
        # By default the coordinator accepts commands on all interfaces.
        others["coordinator_bind_address"] = options.coordinator
    jax.distributed.initialize(
        **({} if options.coordinator == "auto" else others),
        initialization_timeout=60,
        heartbeat_timeout_seconds=options.heartbeat,
        shutdown_timeout_seconds=options.heartbeat,
    )


def make_mesh(num_sharing: int | None) -> jax.sharding.Mesh:
    """Return a mesh of the devices of all processes, with the axes "dp" and "tp".

    Args:
        num_sharing: size of "tp", whose devices share a model; None for all devices of
            one process.
    """
    devices = np.asarray(jax.devices())  # devices of a process are adjacent
    rows = devices.reshape(-1, num_sharing or jax.local_device_count())
    return jax.sharding.Mesh(rows, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)

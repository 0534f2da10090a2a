"""Tests on eight devices, which a CPU simulates if it is told so before JAX starts.

So they run in a process of their own: `make test` does.
"""

import os

NUM_DEVICES = 8

# Before JAX is asked for a device.
os.environ["XLA_FLAGS"] = " ".join(
    [
        f"--xla_force_host_platform_device_count={NUM_DEVICES}",
        os.environ.get("XLA_FLAGS", ""),
    ]
)


def pytest_sessionstart():
    """Say what is wrong where another test had asked JAX for a device before."""
    import jax

    assert jax.device_count() == NUM_DEVICES, "run tests/devices in its own process"

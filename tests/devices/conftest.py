"""Tests on eight devices, simulated on a CPU by a flag set before JAX starts.

So `make test` runs them in a separate process.
"""

import os

NUM_DEVICES = 8

# Before JAX initializes a device.
os.environ["XLA_FLAGS"] = " ".join(
    [
        f"--xla_force_host_platform_device_count={NUM_DEVICES}",
        os.environ.get("XLA_FLAGS", ""),
    ]
)


def pytest_sessionstart():
    """Fail if another test has already initialized JAX's devices."""
    import jax

    assert jax.device_count() == NUM_DEVICES, "run tests/devices in its own process"

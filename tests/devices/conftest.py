"""Tests on eight devices, simulated on a CPU by a flag set before JAX starts.

So they run in a process of their own: `make test` does.
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
    """Report an error if another test has initialized JAX's devices before."""
    import jax

    assert jax.device_count() == NUM_DEVICES, "run tests/devices in its own process"

"""Tests of the integrations run in a separate environment, by `make tunix`.

Tunix's models promote dtypes and ranks, so JAX is not strict here.
"""

import importlib.util
import os

# Before JAX initializes a device: one test shards weights over two.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax  # noqa: E402

if importlib.util.find_spec("tunix"):
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
else:
    collect_ignore_glob = ["*.py"]


def pytest_configure(config):
    """Warnings are errors here, too, except the trainer's own deprecations."""
    for module in (
        "tunix",
        "qwix",
        "orbax",
        "flax",
        "etils",
        "google",
        "treescope",
        "optax",
    ):
        line = f"ignore::DeprecationWarning:{module}.*"
        config.addinivalue_line("filterwarnings", line)

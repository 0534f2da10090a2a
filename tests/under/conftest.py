"""Adapters of published libraries, each with the real package in its own environment.

The libraries promote dtypes and ranks, so JAX is not strict, and emit warnings.
"""

import importlib.util
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax  # noqa: E402

LIBRARIES = ("keras_hub", "gemma", "lalamo", "tunix", "easydel")
PRESENT = [name for name in LIBRARIES if importlib.util.find_spec(name)]
collect_ignore = [f"test_{name}.py" for name in LIBRARIES if name not in PRESENT]

if PRESENT:
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
if "easydel" in PRESENT:
    # It sets XLA_FLAGS that newer versions of XLA do not know.
    jax.devices()


def pytest_configure(config):
    """Ignore the libraries' own warnings."""
    if PRESENT:
        config.addinivalue_line("filterwarnings", "ignore")

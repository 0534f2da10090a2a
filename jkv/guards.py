"""JAX's transfer guards inside public functions.

`jax.transfer_guard("disallow")` detects implicit transfers. Functions of this package
transfer numbers, lists and numpy arrays intentionally, so they do it explicitly, as
`jax.device_put` does. The guard "disallow_explicit" is respected.
"""

import contextlib
from collections.abc import Iterator

import jax

GUARDS = {
    "jax_transfer_guard_host_to_device": jax.transfer_guard_host_to_device,
    "jax_transfer_guard_device_to_host": jax.transfer_guard_device_to_host,
    "jax_transfer_guard_device_to_device": jax.transfer_guard_device_to_device,
}


def refused_transfer(error: Exception) -> bool:
    """Return True if a guard against implicit transfers raised the error."""
    is_guard = "Disallowed" in str(error) and "transfer" in str(error)
    return is_guard and any(_level(name) == "disallow" for name in GUARDS)


@contextlib.contextmanager
def explicit_transfers() -> Iterator[None]:
    """Allow transfers in this thread unless a guard disallows explicit ones."""
    with contextlib.ExitStack() as allowed:
        for name, guard in GUARDS.items():
            if _level(name) == "disallow":
                allowed.enter_context(guard("allow"))
        yield


def _level(name: str) -> str | None:
    """Return the level of a guard in this thread."""
    level: str | None = getattr(jax.config, name)
    return level

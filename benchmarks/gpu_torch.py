"""PyTorch as a peer on a GPU: import and synchronization."""

import importlib.util
from typing import Any

TORCH = "torch scaled_dot_product_attention"


def import_torch() -> Any:
    """Return the module.

    Raises:
      NotImplementedError: torch is not installed, or has no GPU here.
    """
    if importlib.util.find_spec("torch") is None:
        raise NotImplementedError("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise NotImplementedError("torch has no GPU here")
    return torch


class Synchronised:
    """A handle with `block_until_ready`, like JAX arrays."""

    def block_until_ready(self) -> None:
        """Wait for all launched work."""
        import torch

        torch.cuda.synchronize()

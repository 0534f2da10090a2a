"""PyTorch as a peer on a card: whether it is there, and how it is waited for."""

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
    """What a call returns that started something, as JAX's arrays are waited for."""

    def block_until_ready(self) -> None:
        """Wait for all that was started."""
        import torch

        torch.cuda.synchronize()

"""The card that a program is for, as far as it is known where it is traced."""

from typing import NamedTuple

import jax

# Stands for all platforms that are not named.
DEFAULT = "default"


class Card(NamedTuple):
    """What a program is lowered for."""

    platform: str  # as JAX names it: "rocm", "cuda", "cpu"; or `DEFAULT`
    target: str | None  # such as "gfx942" or "sm_90"; None where it is not known


def find_card(platform: str) -> Card:
    """Return what is known of the card of a platform."""
    is_gpu = platform in ("rocm", "cuda")
    return Card(platform, find_target(platform) if is_gpu else None)


def find_gpu() -> Card | None:
    """Return the GPU at hand, None if there is none."""
    cards = map(find_card, ("rocm", "cuda"))
    return next((card for card in cards if card.target is not None), None)


def find_target(
    platform: str,  # "rocm" or "cuda"
) -> str | None:
    """Name the GPU at hand, such as gfx942 or sm_90, as far as it is of a platform.

    None if the program is to run on some other machine, and the card not known.
    """
    device = jax.devices()[0]
    # From JAX 0.11 on a program may be meant for a card that is not here but named
    # (`use_abstract_mesh`); only AMD's names are those of targets.
    mesh = jax.sharding.get_abstract_mesh()
    named = getattr(mesh, "abstract_device", None)
    if named is not None and named.device_kind != device.device_kind:
        is_target = platform == "rocm" and named.device_kind.startswith("gfx")
        return named.device_kind if is_target else None
    name = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or name.startswith("gfx") != (platform == "rocm"):
        return None
    return name.split(":")[0] if platform == "rocm" else f"sm_{name.replace('.', '')}"

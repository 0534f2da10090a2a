"""Persistent cache of a checkpoint's compiled programs."""

import jkv
from jkv.serving import KeptPrograms

from .model import Decoder


def keep_programs(model: Decoder) -> KeptPrograms | None:
    """Cache an engine's executables in the user's cache folder, by model settings.

    Args:
        model: the model.

    Returns:
        An argument of ``jkv.serving.Engine``; None if JAX's compilation cache is
        elsewhere or not writable.
    """
    folder = jkv.keep_compiled_programs()
    if folder is None:
        return None
    import pretrained

    sources = (pretrained,)
    return KeptPrograms(repr(model), sources=sources, folder=folder / "executables")

"""Compiled programs of a checkpoint, kept for the next start."""

import jkv
from jkv.serving import KeptPrograms

from .model import Decoder


def keep_programs(model: Decoder) -> KeptPrograms | None:
    """Keep an engine's executables in the user's cache folder, by the model's settings.

    Args:
        model: the model.

    Returns:
        An argument of ``jkv.serving.Engine``; None if JAX keeps programs elsewhere, or
        nothing can be written.
    """
    folder = jkv.keep_compiled_programs()
    if folder is None:
        return None
    import pretrained

    sources = (pretrained,)
    return KeptPrograms(repr(model), sources=sources, folder=folder / "executables")

"""Cache and texts in a folder, both or none: the state for a restart.

Each state has a folder of its own, named by the number of steps. The cache is written
first, by `jkv.save`, then the texts, under another name until they are whole. A folder
with texts is complete.
"""

import os
import pathlib
import shutil

import jax
import numpy as np

import jkv

from .texts import Texts

CACHE, TEXTS = "cache.safetensors", "texts.npz"


def save_state(
    folder: pathlib.Path, cache: jkv.Cache, texts: Texts, num_steps: int
) -> None:
    """Save the state after `num_steps` steps; all processes call this."""
    newest = folder / f"step-{num_steps:06}"
    if jax.process_index() == 0:
        newest.mkdir(parents=True, exist_ok=True)
    # One process writes, the others bring it their part, and wait until it is done.
    jkv.save(newest / CACHE, cache)
    if jax.process_index() == 0:
        with (newest / "unfinished").open("wb") as file:
            np.savez(file, **{k: np.asarray(v) for k, v in texts._asdict().items()})
        os.replace(newest / "unfinished", newest / TEXTS)
        for older in folder.glob("step-*"):
            if older != newest:
                shutil.rmtree(older)


def load_state(
    folder: pathlib.Path, mesh: jax.sharding.Mesh
) -> tuple[jkv.Cache, Texts, int] | None:
    """Return the newest saved state, None without one; all processes call this."""
    complete = sorted(file.parent for file in folder.glob(f"step-*/{TEXTS}"))
    if not complete:
        return None
    cache = jkv.load(complete[-1] / CACHE, mesh=mesh, heads="tp", pools="dp")
    with np.load(complete[-1] / TEXTS) as saved:
        texts = Texts(**saved)
    return cache, texts, int(complete[-1].name.removeprefix("step-"))

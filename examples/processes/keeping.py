"""Atomic checkpoints of cache and sequences, for restarts.

Each state has its own folder, named after the number of steps. The cache is saved first
(`jkv.save`). The sequences are saved under a temporary name and renamed, so a folder
with sequences is complete.
"""

import os
import pathlib
import shutil

import jax
import numpy as np

import jkv

from .sequences import Sequences

CACHE, SEQUENCES = "cache.safetensors", "sequences.npz"


def save_state(
    folder: pathlib.Path, cache: jkv.Cache, sequences: Sequences, num_steps: int
) -> None:
    """Save the state after `num_steps` steps; to be called by all processes."""
    newest = folder / f"step-{num_steps:06}"
    if jax.process_index() == 0:
        newest.mkdir(parents=True, exist_ok=True)
    # One process writes; the others send their shards and wait.
    jkv.save(newest / CACHE, cache)
    if jax.process_index() == 0:
        with (newest / "unfinished").open("wb") as file:
            np.savez(file, **{k: np.asarray(v) for k, v in sequences._asdict().items()})
        os.replace(newest / "unfinished", newest / SEQUENCES)
        for older in folder.glob("step-*"):
            if older != newest:
                shutil.rmtree(older)


def load_state(
    folder: pathlib.Path, mesh: jax.sharding.Mesh
) -> tuple[jkv.Cache, Sequences, int] | None:
    """Return the newest state, or None; to be called by all processes."""
    complete = sorted(file.parent for file in folder.glob(f"step-*/{SEQUENCES}"))
    if not complete:
        return None
    cache = jkv.load(complete[-1] / CACHE, mesh=mesh, heads="tp", pools="dp")
    with np.load(complete[-1] / SEQUENCES) as saved:
        sequences = Sequences(**saved)
    return cache, sequences, int(complete[-1].name.removeprefix("step-"))

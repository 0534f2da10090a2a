"""Reader of the tensors of a drafter's checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from ..files import Tensors, find_tensors


class Checkpoint:
    """A drafter's tensors; `finish` raises if any were not read."""

    def __init__(self, folder: Path, dtype: Any) -> None:
        """Open the files; parameters are converted to `dtype`."""
        self._tensors = Tensors(find_tensors(folder), None, names_as_stored=True)
        self.dtype = jnp.dtype(dtype)
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Return True if the checkpoint has a tensor of this name."""
        return name in self._tensors.paths

    def read(self, name: str, shape: tuple[int, ...]) -> Any:
        """Return a parameter of `shape`.

        Raises:
            ValueError: if it is missing or has another shape.
        """
        self._read.add(name)
        return jnp.asarray(self._tensors.read(name, shape).astype(self.dtype))

    def read_ids(self, name: str, size: int, vocab_size: int, first: Any = 0) -> Any:
        """Return a tensor of token ids, i32[size].

        Args:
            name: name of the tensor.
            size: number of ids.
            vocab_size: number of tokens of the vocabulary.
            first: ids that the tensor holds the distances from, [size].

        Raises:
            ValueError: if it is missing, or has another shape or ids outside the
                vocabulary.
        """
        if name not in self:
            raise ValueError(f"the checkpoint lacks the tensor {name!r}")
        self._read.add(name)
        with safe_open(self._tensors.paths[name], framework="numpy") as file:
            found = np.asarray(file.get_tensor(name))
        if found.shape != (size,):
            raise ValueError(
                f"tensor {name!r} has shape {found.shape}, but it must be ({size},)"
            )
        ids = found.astype(np.int64) + first
        if not np.all((ids >= 0) & (ids < vocab_size)):
            raise ValueError(
                f"tensor {name!r} gives ids from {ids.min()} to {ids.max()}, but the "
                f"target's vocabulary has {vocab_size} tokens; take a drafter made for "
                "this target"
            )
        return jnp.asarray(ids.astype(np.int32))

    def read_draft_tokens(self, size: int, vocab_size: int) -> jnp.ndarray:
        """Return the target's ids of a draft vocabulary, i32[size].

        Raises:
            ValueError: as `read_ids`.
        """
        # "d2t" holds the distance of each draft id to the target's id.
        return self.read_ids("d2t", size, vocab_size, np.arange(size))

    def read_all(
        self, names: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> dict[str, Any]:
        """Return parameters, given the name and shape of each one's tensor."""
        return {name: self.read(*source) for name, source in names.items()}

    def ignore(self, *names: str) -> None:
        """Mark tensors as read, such as copies of the target's."""
        self._read |= set(names)

    def finish(self) -> None:
        """Check that all tensors were read.

        Raises:
            ValueError: if any was not; a drafter without it would draft worse.
        """
        rest = sorted(set(self._tensors.paths) - self._read)
        if rest:
            raise ValueError(
                f"the drafter's checkpoint holds {len(rest)} tensors that would not be "
                f"used: {', '.join(rest[:4])}"
            )

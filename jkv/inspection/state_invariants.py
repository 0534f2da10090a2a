"""The invariants of states, as `check` reports them; a sentence each."""

from collections.abc import Iterator

import numpy as np

from jkv.config.state_layout import ArrayOf, StateSizes
from jkv.state import Cache, Metadata, StateStorage


def check_pending(metadata: Metadata) -> Iterator[str]:
    """Yield the open sequences with more or fewer tokens pending than can be."""
    if metadata.sequences.num_pending is None:
        return
    pending = np.asarray(metadata.sequences.num_pending)
    most = np.minimum(np.asarray(metadata.context_lengths), metadata.max_pending)
    is_wrong = np.asarray(metadata.is_open) & ((pending < 0) | (pending > most))
    for row in np.flatnonzero(is_wrong):
        yield f"row {row} has {pending[row]} tokens pending, at most {most[row]} can be"


def implied_sizes(cache: Cache, storage: StateStorage) -> StateSizes:
    """Return the sizes that a few of the arrays tell of all others."""
    index = cache.metadata.index
    return StateSizes(
        num_layers=storage.num_layers,
        arrays=_list_arrays(storage, "rows"),
        inputs=_list_arrays(storage, "inputs"),
        max_sequences=cache.max_sequences,
        max_context_length=cache.max_context_length,
        block_size=cache.block_size,
        num_snapshots=index.num_places,
        snapshot_every=index.snapshot_every,
        max_pending=cache.metadata.max_pending,
        heads_axes=(),
    )


def _list_arrays(storage: StateStorage, part: str) -> tuple[ArrayOf, ...]:
    """Return name, shape and dtype of what a sequence, or a token, has in a layer."""
    is_state = part == "rows"
    dtypes = storage.row_dtypes if is_state else storage.input_dtypes
    arrays = sorted(getattr(storage, part).items())
    return tuple(
        (name, array.shape[2 if is_state else 3 :], dtype)
        for (name, array), dtype in zip(arrays, dtypes, strict=True)
    )

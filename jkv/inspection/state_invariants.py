"""The invariants of states, as `check` reports them; a sentence each."""

from collections.abc import Iterator

import numpy as np

from jkv.config.state_layout import ArrayOf, StateSizes
from jkv.state import Cache, Metadata, StateStorage


def check_pending(metadata: Metadata) -> Iterator[str]:
    """Yield the open sequences with more or fewer tokens pending than can be."""
    states = metadata.states
    if states is None or states.num_pending is None:
        return
    pending = np.asarray(states.num_pending)
    most = np.minimum(np.asarray(metadata.context_lengths), states.max_pending)
    is_wrong = np.asarray(metadata.is_open) & ((pending < 0) | (pending > most))
    for row in np.flatnonzero(is_wrong):
        yield f"row {row} has {pending[row]} tokens pending, at most {most[row]} can be"


def check_snapshots(metadata: Metadata) -> Iterator[str]:
    """Yield the snapshots of texts that cannot be, and two of one text."""
    states = metadata.states
    if states is None or states.snapshots is None:
        return
    snapshots, known = states.snapshots, dict[tuple[int, bytes], int]()
    lengths, texts = np.asarray(snapshots.lengths), np.asarray(snapshots.texts)
    for place in np.flatnonzero(lengths).tolist():
        length, pending = int(lengths[place]), int(snapshots.num_pending[place])
        if not 0 < length <= texts.shape[1] or length % snapshots.every:
            yield f"the snapshot at place {place} has length {length}"
            continue
        if not 0 <= pending <= min(states.max_pending, length):
            yield f"the snapshot at place {place} has {pending} tokens pending"
        text = texts[place, :length]
        if np.any(text < 0):
            yield f"the snapshot at place {place} has tokens that were not told"
        key = int(snapshots.salts[place]), text.tobytes()
        if key in known:
            yield f"the snapshots at places {known[key]} and {place} have one text"
        known[key] = place


def implied_sizes(cache: Cache) -> tuple[StateSizes, ...]:
    """Return the sizes that a few of the arrays tell of all others."""
    states = cache.metadata.states
    snapshots = None if states is None else states.snapshots
    return tuple(
        StateSizes(
            num_layers=storage.num_layers,
            arrays=_list_arrays(storage, "rows"),
            inputs=_list_arrays(storage, "inputs"),
            max_sequences=cache.max_sequences,
            max_context_length=cache.max_context_length,
            block_size=cache.block_size,
            num_snapshots=0 if snapshots is None else snapshots.lengths.shape[0],
            snapshot_every=None if snapshots is None else snapshots.every,
            max_pending=0 if states is None else states.max_pending,
            heads_axes=(),
        )
        for storage in cache.states
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

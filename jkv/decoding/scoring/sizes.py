"""The sizes of configurations for a tree that is scored."""

from typing import Any

import jax.numpy as jnp

from jkv.config.counts import WITHOUT_INDEX
from jkv.decoding.texts.text_tree import TextTree


def size_sequences(tree: TextTree) -> dict[str, Any]:
    """Return the fields that say how many texts there are, and how long they get."""
    return dict(
        max_sequences=tree.num_segments, max_context_length=max(1, tree.max_length)
    )


def size_blocks(tree: TextTree, num_blocks: int) -> dict[str, Any]:
    """Return the fields of a `CacheConfig` that a tree in so many blocks changes."""
    return size_sequences(tree) | dict(
        num_blocks=num_blocks,
        dtype=jnp.float32,
        value_dtype=None,
        record_tokens=False,
        **WITHOUT_INDEX,
        # The rows of a segment see what a window would have given back.
        sliding_window=None,
        num_sink_tokens=0,
    )


def size_states(tree: TextTree) -> dict[str, Any]:
    """Return the fields of a `StateConfig` that are exchanged for a tree."""
    return size_sequences(tree) | dict(
        num_snapshots=0,
        snapshot_every=None,
        max_pending=0,
        inputs=None,
        heads_axes=None,
    )

"""The sizes of a cache in words."""

from collections.abc import Sequence

from jkv.config.arrays import count_bytes
from jkv.config.layout import AnySizes, lay_out
from jkv.config.units import human_bytes


def describe(
    groups: Sequence[AnySizes], prefix_caching: bool, *, numbered: bool = False
) -> list[str]:
    """Say in two lines for each group what the model and the blocks are, then the rest.

    Groups say their numbers if asked to. The last lines are the tables and the bytes.
    """
    lines = []
    for number, sizes in enumerate(groups):
        first, second = sizes.describe(prefix_caching)
        lines += [f"group {number}: {first}" if numbered else first, second]
    arrays = lay_out(groups, prefix_caching)
    metadata = [a for path, a in arrays.items() if path.startswith("metadata.")]
    return [
        *lines,
        f"{groups[0].max_sequences:,} sequences of up to "
        f"{groups[0].max_context_length:,} tokens",
        f"{human_bytes(count_bytes(arrays.values()))}, "
        f"{human_bytes(count_bytes(metadata))} of it metadata",
    ]

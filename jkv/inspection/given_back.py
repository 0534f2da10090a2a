"""What a sliding window gave back, recounted for `check`."""

from collections.abc import Iterator

import numpy as np

from jkv.state import Metadata


def gone_columns(meta: Metadata, row: int) -> tuple[int, int]:
    """Return the columns of a row that were given back, from and to."""
    if meta.window is None:
        return 0, 0
    start = -(-meta.window.num_sink_tokens // meta.block_size)
    return start, start + int(np.asarray(meta.window.num_given_back)[row])


def check_given_back(meta: Metadata) -> Iterator[str]:
    """Yield the sequences whose next row would see what is gone."""
    if meta.window is None:
        return
    lengths, is_open = np.asarray(meta.context_lengths), np.asarray(meta.is_open)
    for row, count in enumerate(np.asarray(meta.window.num_given_back).tolist()):
        if count < 0 or (count > 0 and not is_open[row]):
            yield f"given_back: row {row} has given back {count} blocks"
        first_seen = max(int(lengths[row]) - meta.window.length + 1, 0)
        _, end = gone_columns(meta, row)
        if count > 0 and end * meta.block_size > first_seen:
            yield (
                f"given_back: row {row} keeps tokens from {end * meta.block_size} on, "
                f"its next row sees those from {first_seen} on"
            )

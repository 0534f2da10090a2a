"""The numbers of a tree of texts, where they are known: what they mean, what is wrong.

On the host, in numpy. Symbols: R rows, S segments.
"""

from typing import Any, NamedTuple

import numpy as np

from jkv.status import UsageError

NO_PARENT = -1

Numbers = np.ndarray[Any, Any]


class Measures(NamedTuple):
    """Where the segments of a tree stand."""

    first_rows: Numbers  # i32[S], R for a segment without tokens
    lengths: Numbers  # i32[S]
    ends: Numbers  # i32[S], tokens of each segment's text


def measure_segments(segments: Numbers, parents: Numbers) -> Measures:
    """Measure segments by the segment of each row, i32[R], and the parents, i32[S]."""
    rows = np.flatnonzero(segments >= 0)
    first_rows = np.full(parents.shape, len(segments), np.int32)
    np.minimum.at(first_rows, segments[rows], rows.astype(np.int32))
    lengths = np.bincount(segments[rows], minlength=len(parents)).astype(np.int32)
    ends = lengths.copy()
    for segment, parent in enumerate(parents):
        if 0 <= parent < segment:
            ends[segment] += ends[parent]
    return Measures(first_rows, lengths, ends)


def check_numbers(
    tokens: Numbers,  # i32[R]
    segments: Numbers,  # i32[R]
    parents: Numbers,  # i32[S]
    max_length: int,  # most tokens of a text
) -> None:
    """Raise UsageError for the first number of a tree that breaks an invariant."""
    numbers = np.arange(len(parents))
    for segment in np.flatnonzero((parents >= numbers) | (parents < NO_PARENT)):
        raise UsageError(
            f"segment {segment} has parent {parents[segment]}; a parent stands before "
            f"its children, and -1 is for none"
        )
    is_wrong = (segments >= len(parents)) | (segments < -1)
    is_wrong |= (segments < 0) != (tokens < 0)
    for row in np.flatnonzero(is_wrong):
        raise UsageError(
            f"row {row} has token {tokens[row]} and segment {segments[row]} of "
            f"{len(parents)}; a row without a token has -1 in both"
        )
    # Each segment begins once.
    begins = segments[np.flatnonzero(np.diff(segments, prepend=-1) != 0)]
    num_begins = np.bincount(begins[begins >= 0], minlength=1)
    for segment in np.flatnonzero(num_begins > 1):
        raise UsageError(f"the rows of segment {segment} do not stand side by side")
    ends = measure_segments(segments, parents).ends
    for segment in np.flatnonzero(ends > max_length):
        raise UsageError(
            f"the text of segment {segment} has {ends[segment]} tokens, and "
            f"max_length is {max_length}"
        )

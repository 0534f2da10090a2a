"""Partly filled last blocks: where sequences part ways, one of them gets a copy."""

import dataclasses
from typing import NamedTuple

import jax

from jkv.state import Metadata


class BlockCopies(NamedTuple):
    """Blocks whose contents one call copies, at most one per request."""

    source: jax.Array  # i32[B], any block where there is no copy
    target: jax.Array  # i32[B], N where there is no copy


def copy_tokens(metadata: Metadata, copies: BlockCopies) -> Metadata:
    """Copy the recorded tokens of blocks, if tokens are recorded."""
    if metadata.tokens is None:
        return metadata
    rows = metadata.tokens.at[copies.source].get(mode="clip")
    tokens = metadata.tokens.at[copies.target].set(rows, mode="drop")
    return dataclasses.replace(metadata, tokens=tokens)

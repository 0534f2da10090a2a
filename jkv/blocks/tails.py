"""Partly filled last blocks: where sequences part ways, one of them gets a copy."""

import dataclasses
from typing import NamedTuple

import jax

from jkv.state import BlockGroup


class BlockCopies(NamedTuple):
    """Blocks of a group whose contents one call copies, at most one per request."""

    source: jax.Array  # i32[B], any block where there is no copy
    target: jax.Array  # i32[B], N where there is no copy


def copy_tokens(group: BlockGroup, copies: BlockCopies) -> BlockGroup:
    """Copy the recorded tokens of blocks, if the group has tokens."""
    if group.tokens is None:
        return group
    rows = group.tokens.at[copies.source].get(mode="clip")
    tokens = group.tokens.at[copies.target].set(rows, mode="drop")
    return dataclasses.replace(group, tokens=tokens)

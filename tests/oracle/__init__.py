"""The cache in plain Python: an independent second reading of the contract.

The cache is a dict of open sequences, each a list of blocks and a list of stored
tokens, and two lists: the free blocks and the free ids, in order. Every batch is a loop
over its requests, and nothing is stored that can be counted: a reference count is a
count over the tables, a context length the length of a list. A stored token is whatever
the test hands to `append`, so contents travel with their sequence and not with the
blocks; the blocks are kept beside them only to say which ids the cache must use.

Read `cache` first; `moving` adds what gives sequences or blocks another place, and
`prefixes` what finds prompts again.
"""

from oracle.cache import (
    BATCH_FULL,
    CONTEXT_FULL,
    INVALID_ARGUMENT,
    INVALID_SEQUENCE,
    OK,
    OUT_OF_BLOCKS,
    OUT_OF_SEQUENCES,
    PADDING,
    Batch,
    Row,
    Sequence,
    held,
)
from oracle.moving import Oracle
from oracle.prefixes import PrefixOracle

__all__ = [
    "BATCH_FULL",
    "CONTEXT_FULL",
    "INVALID_ARGUMENT",
    "INVALID_SEQUENCE",
    "OK",
    "OUT_OF_BLOCKS",
    "OUT_OF_SEQUENCES",
    "PADDING",
    "Batch",
    "Oracle",
    "PrefixOracle",
    "Row",
    "Sequence",
    "held",
]

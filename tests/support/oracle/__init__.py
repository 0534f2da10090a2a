"""The cache in plain Python: an independent second reading of the contract.

The cache is a dict of open sequences, each a list of stored tokens and a list of blocks
for each group of layers; and for each group the list of its free blocks, in order.
Every batch is a loop over its requests, and nothing is stored that can be counted: a
reference count is a count over the tables, a context length the length of a list. The
test chooses a stored token and hands it to `append`, so contents travel with their
sequence and not with the blocks; the blocks are kept beside them only to give the ids
that the cache must use.

Read `groups` and `cache` first; `prefixes` adds prefix caching, `pruning` drops tokens
from the middle of sequences, and `moving` changes the places of sequences or blocks.
"""

"""The cache in plain Python, an independent implementation of the contract.

The cache is a dict of open sequences, each with a list of stored tokens and a list of
blocks per group of layers, and an ordered list of free blocks per group. A batch is a
loop over its requests, and nothing is stored that can be counted: a reference count is
a count over the tables, a context length the length of a list. The test passes the
stored tokens to `append`, so contents belong to the sequence and not to the blocks;
blocks are kept only to predict the ids that the cache must use.

Read `groups` and `cache` first; `prefixes` adds prefix caching, `pruning` drops tokens
from the middle of sequences, and `moving` relocates sequences and blocks.
"""

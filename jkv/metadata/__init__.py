"""Private bookkeeping over the metadata; no storage and no public names.

Start with `requests`, what all verbs share, then `part.Part`, the interface of a kind
of storage, and `allocator.grant`.
"""

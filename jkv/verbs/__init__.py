"""The public verbs, one or a pair per file.

In the order of a cache's life: `allocation`, `appending`, `writing`, `attending`, then
`branching` (fork, truncate, reorder). Each checks its arguments, judges the requests,
agrees on what the pools can serve, and applies it. Start with `allocation.allocate`.
"""

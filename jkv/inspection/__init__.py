"""Host-side statistics, memory profile, invariant checks and debug mode of a cache."""

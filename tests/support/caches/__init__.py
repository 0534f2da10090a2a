"""Random-operation tests of caches against the oracle."""

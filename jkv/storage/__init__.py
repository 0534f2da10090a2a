"""Storage of blocks and states: copies between pools, host and files."""

"""Private bookkeeping over the metadata; no storage and no public names."""

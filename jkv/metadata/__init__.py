"""Private bookkeeping: metadata in, metadata out; no storage, no public name."""

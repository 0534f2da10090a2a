"""Requests of the engine: options, limits, progress, detokenization and results."""

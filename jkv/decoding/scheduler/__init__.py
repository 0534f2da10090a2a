"""Continuous batching: admission, preemption and the shared step."""

"""Launches of the kernels."""

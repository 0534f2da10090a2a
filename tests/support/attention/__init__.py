"""Attention shapes, stored rows by format, and kernels lowered without a GPU."""

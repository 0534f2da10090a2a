"""From calls to launches of kernels."""

"""The bodies of the kernels."""

"""What runs inside the kernels."""

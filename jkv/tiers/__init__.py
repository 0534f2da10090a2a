"""KV cache offloading: spill cached blocks to host memory and disk; restore them."""

"""The fast path without a custom kernel: loops over gathered chunks of blocks."""

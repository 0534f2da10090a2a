"""What a cache holds and costs, and whether it is sound; for the host."""

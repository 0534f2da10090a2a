"""Cached blocks outside the pool: on the host, on disk, and back."""

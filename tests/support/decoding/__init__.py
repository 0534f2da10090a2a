"""Decoding loops in plain Python, and their inputs."""

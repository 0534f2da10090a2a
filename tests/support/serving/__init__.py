"""Engines around a small model, and their servers and processes."""

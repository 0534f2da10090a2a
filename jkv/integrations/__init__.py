"""Integrations with trainers, each in a package that imports its dependency."""

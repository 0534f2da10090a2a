"""Steering: which tokens a text may have next, decided inside the jit."""

from jkv.steering.protocol import Steering

__all__ = ["Steering"]

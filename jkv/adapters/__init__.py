"""Models written for another cache: one step of theirs, and their `jkv.Model`."""

from jkv.adapters.model import model_of
from jkv.adapters.step import Step

__all__ = ["Step", "model_of"]

"""Loops that turn a model and a cache into text, each inside one jit."""

from jkv.decoding.generation import decode, generate, prefill
from jkv.decoding.model import Model
from jkv.decoding.options import Sampling
from jkv.decoding.results import (
    FinishReason,
    Generation,
    GenerationState,
    Statistics,
)
from jkv.decoding.sampling import filter_logits, sample

__all__ = [
    "FinishReason",
    "Generation",
    "GenerationState",
    "Model",
    "Sampling",
    "Statistics",
    "decode",
    "filter_logits",
    "generate",
    "prefill",
    "sample",
]
